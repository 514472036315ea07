"""SpecReason: Fast and Accurate Inference-Time Compute via Speculative Reasoning (Pan et al. 2025,
arXiv:2504.07891): the small model writes the steps of a chain of thought, the large one reads each,
gives it a mark from 0 to 9 in a single token, and writes anew what it finds poor. Lossy.

The paper's models are reasoners of 32 and 1.5 billion parameters, and its tokens may be speculated
within a step; here that is `LLM(draft_model=)` of the large model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.sampling import SamplingParams
from effinfer.techniques.step_pair import StepPair, check_score

if TYPE_CHECKING:
    from effinfer.llm import LLM

QUESTION = (
    "\n\nHow useful and correct is the last step above, from 0 (wrong) to 9 (right)? One digit: "
)


class SpecReason(StepPair):
    """`SpecReason(large, small, threshold=7).generate(prompt)`.

    Args:
        threshold: the least mark of a step that is kept, 0 to 9; more is slower and better.
        question: what the large model is asked behind the step; its next token is a digit.
    """

    def __init__(
        self,
        large: LLM,
        small: LLM,
        *,
        threshold: float = 7.0,
        question: str = QUESTION,
        separator: str = "\n\n",
        step_tokens: int = 128,
    ) -> None:
        super().__init__(large, small, separator=separator, step_tokens=step_tokens)
        check_score(self, "threshold", threshold, 0, 9)
        self.threshold, self.question = threshold, question
        self._digits = [_token_of(large, str(digit)) for digit in range(10)]

    def judge(self, prompt: str, text: str, step: str) -> float:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logit_bias=dict.fromkeys(self._digits, 100.0),
            ignore_eos=True,
        )
        (output,) = self.large.generate([prompt + text + step + self.question], params)
        return float(self._digits.index(output.token_ids[0]))

    def accepts(self, score: float) -> bool:
        return score >= self.threshold


def _token_of(llm: LLM, digit: str) -> int:
    ids = llm.tokenize(digit, add_special=False)
    if llm.detokenize(ids[-1:]) != digit:
        raise _core.UnsupportedError(f"[SpecReason] large: expected a token for the digit {digit}")
    return ids[-1]
