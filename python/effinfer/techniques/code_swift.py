"""CodeSwift: Accelerating LLM Inference for Efficient Code Generation (Zhao et al.,
arXiv:2502.17139).

Code repeats what a project already has. Drafts are looked up in the project's own files, in what
was generated for it before, and in the text at hand; lookups that find nothing cost nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from effinfer import _core


@dataclass(frozen=True)
class CodeSwift:
    """
    Args:
        corpus: token ids of the project's files, -1 between two; CodeSwift.of_files() reads them.
        shared_tokens: of what was generated, so many tokens are kept.

    The paper's cache of verified tokens is `shared_tokens` here; its skipping of tokens after which
    lookups miss is the controller's calibration.
    """

    corpus: Sequence[int]
    shared_tokens: int = 1 << 16

    @classmethod
    def of_files(
        cls, paths: Iterable[str | Path], tokenize: Callable[[str], list[int]]
    ) -> "CodeSwift":
        """Of text files; `tokenize` is the model's, such as LLM.tokenize."""
        corpus: list[int] = []
        for path in paths:
            corpus += [*tokenize(Path(path).read_text(encoding="utf-8")), -1]
        return cls(corpus)

    def build(self) -> _core.Proposer:
        return _core.suffix_proposer(self.shared_tokens, corpus=list(self.corpus))
