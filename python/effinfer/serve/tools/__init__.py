"""How models write calls of tools: a format for each family, told by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from effinfer.serve.tools.calls import ToolParser
from effinfer.serve.tools.mistral import MistralParser
from effinfer.serve.tools.plain import PlainParser
from effinfer.serve.tools.tagged import TaggedParser


@dataclass(frozen=True)
class ToolFormat:
    parser: Callable[[Collection[str]], ToolParser]  # of the names of tools
    has_control_tokens: bool = False  # its marks are control tokens, which texts leave out


JSON = ToolFormat(PlainParser)
FORMATS = {
    "hermes": ToolFormat(TaggedParser),
    "llama3": ToolFormat(PlainParser, has_control_tokens=True),
    "mistral": ToolFormat(MistralParser, has_control_tokens=True),
    "gemma": JSON,
}
# What the template of a family writes.
_SIGNS = (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3"))


def find_format(template: str, name: str | None = None) -> ToolFormat:
    """The format of that name, or the one that a chat template tells: plain JSON if none."""
    if name is not None:
        return FORMATS[name]
    for sign, found in _SIGNS:
        if sign in template:
            return FORMATS[found]
    return FORMATS["llama3" if "<|eot_id|>" in template else "gemma"]
