"""Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): a chain of
what followed the last occurrence of the text's last tokens."""

from dataclasses import dataclass

from effinfer import _core


@dataclass(frozen=True)
class PromptLookup:
    """
    Args:
        longest, shortest: tokens that are looked up, the longest match first.
        length: tokens of a draft.
    """

    longest: int = 3
    shortest: int = 2
    length: int = 8

    def build(self) -> _core.Proposer:
        return _core.prompt_lookup_proposer(self.longest, self.shortest, self.length)
