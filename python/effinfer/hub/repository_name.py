"""Repositories of the Hugging Face hub, named as their pages spell them.

org/repo                    the whole folder, or of its GGUF files the usual one
org/repo:Q4_K_M             the GGUF file of that type
hf:org/repo/file.gguf       one file
hf:org/repo, hf:org/repo:Q4_K_M
"""

import re
from dataclasses import dataclass

from effinfer import _core

_NAME = re.compile(
    r"(?P<hf>hf:)?(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[^:]+)|:(?P<tag>[\w.-]+))?"
)


@dataclass(frozen=True)
class Name:
    repo: str  # "org/repo"
    file: str | None = None
    tag: str | None = None
    bare: bool = True  # without hf:, it may have been meant as a path

    def __str__(self) -> str:
        return self.repo + (f"/{self.file}" if self.file else f":{self.tag}" if self.tag else "")


def is_name(text: str) -> bool:
    """Whether a text is meant as a repository: hf:..., or in the form of one."""
    found = _NAME.fullmatch(text)
    return text.startswith("hf:") or (found is not None and found["file"] is None)


def parse(text: str) -> Name:
    """Throws InvalidArgumentError."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise _core.InvalidArgumentError(
            f"[load] model: expected hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf, got "
            f"{text!r}"
        )
    return Name(found["repo"], found["file"], found["tag"], found["hf"] is None)
