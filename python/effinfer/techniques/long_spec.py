"""LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification
(Yang et al. 2025, arXiv:2502.17421): a draft layer whose own keys are those of a short window, so
that they take no more memory in long texts; of what lies before, it attends to the target's cache.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.techniques.target_keys import TargetKeys


@dataclass(frozen=True)
class LongSpec(TargetKeys):
    """`LLM(target, draft_model=LongSpec("long_spec.gguf"))`.

    The window is of 16 tokens, where the paper's is of 512; the target's keys are a copy of those
    of generated tokens, and the pages behind the window are kept. As the paper's anchor-offset
    indices do, the recipe trains at positions beyond the training text, but moves whole texts,
    without an anchor. Its attention for trees is the engine's own.
    """

    kind: ClassVar[str] = "long_spec"
    window: ClassVar[int] = 15
