"""BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models (Lin et al. 2024,
arXiv:2401.12522): prompt embeddings that only mask rows see, and mask embeddings behind every
candidate, so that each step verifies and guesses.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.techniques.extra_rows import ExtraRows


@dataclass(frozen=True)
class BiTA(ExtraRows):
    """`LLM(target, draft_model=BiTA("bita.gguf"), speculation=Speculation([], controller=40))`.

    The paper's prompt embeddings stand once before the text; here they are rows before the masks of
    each group, which costs them anew in every step. Candidates are a chain in place of a tree.
    """

    kind: ClassVar[str] = "bita"
