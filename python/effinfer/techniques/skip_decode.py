"""SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference
(Del Corro et al. 2023, arXiv:2307.02628): the further a text is, the fewer layers its tokens run.
Those that are left out lie behind the first ones and before the last, and never come back, so that
every key that a token asks for is there. Lossy.

The paper fine-tunes the model for it. It lets the number decline over prompt and output; here
prompts run all layers.
"""

import os
from collections.abc import Collection

from effinfer.techniques.chain_proposer import check_sizes
from effinfer.techniques.depth_decoder import DepthDecoder


class SkipDecode(DepthDecoder):
    """`SkipDecode("smollm2-135m", least=24, span=128).generate(prompt)`.

    Args:
        least: layers that the last tokens run.
        span: tokens of output over which the number declines to it, by equal steps.
        first: layers at the beginning that always run.
        stride: layers that go at once; each number of them is a graph that is compiled once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        least: int,
        span: int = 128,
        first: int = 4,
        stride: int = 2,
        max_seq_len: int = 2048,
        threads: int | None = None,
    ) -> None:
        super().__init__(model, max_seq_len=max_seq_len, threads=threads)
        self.least, self.span, self.first, self.stride = least, span, first, stride
        check_sizes(self, {"first": 0, "span": 1, "stride": 1})
        check_sizes(self, {"least": max(first, 1)})

    def skipped(self, position: int) -> Collection[int]:
        most = max(self.num_layers - self.least, 0)
        count = most * min(position, self.span) // self.span // self.stride * self.stride
        if position >= self.span:
            count = most
        return range(self.first, self.first + count)
