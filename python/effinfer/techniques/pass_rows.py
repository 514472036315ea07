"""PaSS: Parallel Speculative Sampling (Monea et al. 2023, arXiv:2311.13581): embeddings of
look-ahead tokens behind the text make the model itself guess several tokens in a step; the next
step verifies them.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.techniques.extra_rows import ExtraRows


@dataclass(frozen=True)
class PaSS(ExtraRows):
    """`LLM(target, draft_model=PaSS("pass.gguf"), speculation=Speculation([], controller=8))`.

    As in the paper a step that guesses and one that verifies take turns, and embeddings learn the
    tokens of a text with the model frozen. The paper samples its guesses; here they are the
    likeliest, as `match` accepts no others more often.
    """

    kind: ClassVar[str] = "pass"
    everywhere: ClassVar[bool] = False
