"""M2R2: Mixture of Multi-rate Residuals for Efficient Transformer Inference (Bhendawade et al.
2025, arXiv:2502.02040): beside the residual stream of the first layers runs a faster one, which
small adapters bring to where the stream of all layers ends. It drafts.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.graph import Value
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.trained_exit import TrainedExit


@dataclass(frozen=True)
class M2R2(TrainedExit):
    """`LLM(target, draft_model=M2R2("m2r2.gguf"))`.

    As in the paper the fast stream attends to the keys of the slow one, and each of its halves of a
    layer has an adapter of a low rank. Its use for leaving early without verification and for
    fetching experts ahead is not here; the draft has pages of its own.
    """

    kind: ClassVar[str] = "m2r2"
    own_norm: ClassVar[bool] = False

    def leave(self, copy: GraphCopy, exit_layer: int) -> Value:
        fast = copy.take(copy.streams[0])
        for number in range(exit_layer):
            copy.take(copy.streams[number + 1])
            keys = {name: copy.known[name] for name in copy.caches(number)}
            half = copy.layer(number, fast, until=copy.halves[number], known=keys)
            fast = copy.ops.add(half, self._speed(copy, fast, number, "attn", copy.streams[number]))
            behind = {copy.halves[number]: fast}
            whole = copy.layer(number, fast, known=behind)
            fast = copy.ops.add(whole, self._speed(copy, fast, number, "ffn", copy.halves[number]))
        return fast

    def _speed(self, copy: GraphCopy, x: Value, number: int, part: str, stream: str) -> Value:
        """What an adapter adds to a stream, beside what the layer's attention or MLP adds."""
        y = copy.norm_like(x, stream, f"blk.{number}.{part}_norm.weight")
        name = f"{self.kind}.{number}.{part}"
        down = copy.ops.silu(copy.linear(y, f"{name}_down.weight"))
        return copy.linear(down, f"{name}_up.weight")
