"""GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding (Du et al. 2024,
arXiv:2402.02082): a draft layer that also attends to the target's cache.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.techniques.target_keys import TargetKeys


@dataclass(frozen=True)
class GliDe(TargetKeys):
    """`LLM(target, draft_model=GliDe("glide.gguf"))`.

    The paper's draft reads the target's cache where it lies, prompt and all; here it has a copy of
    what the target's last layer cached for generated tokens. CaPE, which adds candidates where the
    draft is unsure, is the controller's and `least` here: drafts are chains that end there.
    """

    kind: ClassVar[str] = "glide"
