"""What the wrappers of batched prefill have in common."""

from typing import Any

from effinfer.ops.shared.options import Scores, expect
from effinfer.ops.shared.planned import PlannedAttention
from effinfer.ops.shared.sequences import Heads, Sequences
from effinfer.ops.shared.wrapper import FixedBuffers, Wrapper


class BatchPrefill(Wrapper):
    _fixed_on_gpu = True

    def _fix(self, masks: dict[str, Any], **buffers: Any) -> None:
        """Fixed sizes, which are those of the buffers; `masks` may be None."""
        given = {name: buffer for name, buffer in masks.items() if buffer is not None}
        self._masked = bool(given)
        self._buffers = FixedBuffers(self._op, on_gpu=self._fixed_on_gpu, **buffers, **given)

    def _plan(
        self,
        sequences: Sequences,
        heads: Heads,
        scores: Scores,
        masks: dict[str, Any],
        q_data_type: Any,
        window_left: int,
        **lists: Any,
    ) -> None:
        """Makes the plan; `lists` go to the buffers of their names, where there are some."""
        planned = PlannedAttention(
            self._op,
            sequences,
            heads,
            scores,
            layout=self._layout,
            q_data_type=q_data_type,
            window_left=window_left,
            **masks,
        )
        self._keep(sequences, masks, **lists)
        if self._buffers is not None:
            self._buffers.place(planned, "paged_kv_indices_buf", "custom_mask_buf")
        self._planned = planned

    def _keep(self, sequences: Sequences, masks: dict[str, Any], **lists: Any) -> None:
        """Copies the lists of a plan to the buffers, where there are some."""
        if self._buffers is None:
            return
        self._buffers.batch("qo_indptr_buf", sequences.qo_indptr.size)
        self._buffers.rows(int(sequences.qo_indptr[-1]))
        argument = f"[{self._op}] custom_mask"
        if self._masked:
            expect("mask" in masks, argument, "a mask, as there is custom_mask_buf", None)
            bits = {"custom_mask_buf": masks["mask"], "mask_indptr_buf": masks["mask_indptr"]}
            lists |= bits
        else:
            expect("mask" not in masks, argument, "custom_mask_buf of the constructor", None)
        self._buffers.keep(qo_indptr_buf=sequences.qo_indptr, **lists)
