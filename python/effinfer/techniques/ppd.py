"""PPD: Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference
(Chen et al. 2024, arXiv:2405.18628): trained prompt tokens behind the text and behind every
candidate, so that each step verifies and guesses.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.techniques.extra_rows import ExtraRows


@dataclass(frozen=True)
class PPD(ExtraRows):
    """`LLM(target, draft_model=PPD("ppd.gguf"), speculation=Speculation([], controller=24))`.

    As in the paper they learn the model's own distributions. The paper's prompt tokens are
    ensembles of several embeddings, and its candidates a tree of a size that fits the hardware;
    here a token is one embedding and the candidates are a chain.
    """

    kind: ClassVar[str] = "ppd"
