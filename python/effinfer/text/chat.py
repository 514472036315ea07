"""Chat templates: jinja2 in a sandbox, since a template is code from a model file."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from effinfer import _core
from effinfer.text.messages import Message, check_messages


class ChatTemplate:
    """A template that turns messages into the text of a prompt.

    The environment is that of Hugging Face templates: `messages`, `add_generation_prompt`,
    `tools`, `documents`, `bos_token`, `eos_token`, `raise_exception`, `strftime_now`, the `tojson`
    filter without HTML escapes, `break` and `continue` in loops.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Throws FormatError for a template that does not parse."""
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise _core.FormatError(f"[chat] template: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. Throws InvalidArgumentError for messages that are not
        {"role", "content"} (see check_messages) or that the template refuses."""
        checked = check_messages(messages)
        try:
            return self._template.render(
                messages=checked,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **{**self._tokens, **variables},
            )
        except (
            jinja2.TemplateError,
            TypeError,
            LookupError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise _core.InvalidArgumentError(f"[chat] messages: {error}") from error


def missing_template(model: str) -> _core.Error:
    return _core.InvalidArgumentError(
        f"[chat] {model}: the file holds no chat template; pass chat_template=... or use generate()"
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
