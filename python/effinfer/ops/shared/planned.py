"""A planned attention call: what the wrappers' plan() makes and their run() calls."""

from typing import Any, TypeVar

import numpy as np

from effinfer import _core
from effinfer._core import (
    DeviceArray,
    InvalidArgumentError,
    PagedKv,
    Queue,
    ThreadPool,
    UnsupportedError,
)
from effinfer.ops.rope import apply_rope_pos_ids
from effinfer.ops.shared.arrays import Array, dtype_name
from effinfer.ops.shared.float32 import as_float32, from_float32
from effinfer.ops.shared.options import (
    LAYOUTS,
    Indices,
    Scores,
    alibi_slopes,
    contiguous_rows,
    data_type_name,
    errors_of,
    expect,
    number_or_array,
    one_of,
    view_3d,
)
from effinfer.ops.shared.places import HOST, AnyView, DevicePlace, Place, place_of
from effinfer.ops.shared.sequences import Heads, Sequences

PlanT = TypeVar("PlanT")


class PlannedAttention:
    """An `_core.AttentionPlan` with the options that belong to its scores.

    ROPE_LLAMA rotates queries and keys to their positions first, in float32; the keys of a paged
    cache are gathered for that on every run.
    """

    def __init__(
        self,
        op: str,
        sequences: Sequences,
        heads: Heads,
        scores: Scores,
        *,
        layout: str = "NHD",
        q_data_type: Any = None,
        rope_dims: int = 0,
        **plan: Any,
    ) -> None:
        self.op = op
        self.heads = heads.check(op)
        self.scores = scores.check(op)
        self.layout = layout
        self.window_left = int(plan.get("window_left", -1))
        self._sequences = sequences
        self._q_dims = heads.head_dim_qk - rope_dims
        self._q_data_type = data_type_name(q_data_type)
        self._rotates = scores.pos_encoding_mode == "ROPE_LLAMA"
        self._slopes = (
            alibi_slopes(heads.num_qo_heads) if scores.pos_encoding_mode == "ALIBI" else None
        )
        self._slopes_there: dict[str, DeviceArray] = {}  # by device
        lists = sequences.ragged() if self._rotates else sequences
        with errors_of(op):
            self._plan = _core.AttentionPlan(
                lists.qo_indptr,
                lists.kv_indptr,
                lists.kv_indices,
                lists.kv_len,
                page_size=lists.page_size,
                num_qo_heads=heads.num_qo_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim_qk=heads.head_dim_qk,
                head_dim_vo=heads.head_dim_vo,
                **plan,
            )

    def run(
        self,
        q: Any,
        k: AnyView | PagedKv,
        v: AnyView | PagedKv,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        q_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sinks: Any = None,
        sm_scale: float | None = None,
        pool: ThreadPool | Queue | None = None,
        **parts: Any,
    ) -> Any:
        """Attention of q; `out`, or (out, lse) with `return_lse`. The engine's pages come as k;
        `sm_scale` takes the place of the plan's."""
        at = place_of(q, pool, f"[{self.op}] q")
        queries = self._queries(at, q)
        shape = (queries.shape[0], self.heads.num_qo_heads, self.heads.head_dim_vo)
        given, out_view = at.result(q, shape, None, out, f"[{self.op}] out")
        sums = given_sums = None
        if return_lse:
            given_sums, sums = at.result(q, shape[:2], np.float32, lse, f"[{self.op}] lse")
        scale = self.scores.scale(self.heads.head_dim_qk) if sm_scale is None else float(sm_scale)
        scale *= 1.0 if q_scale is None else q_scale
        layout, target = self.layout, out_view
        if isinstance(k, PagedKv) or isinstance(v, PagedKv):
            ok = not self._rotates
            expect(ok, f"[{self.op}] paged_kv_cache", "arrays with ROPE_LLAMA", "PagedKv")
        elif self._sequences.kv_indices is None and layout == "HND":
            k, v, layout = k.swapaxes(0, 1), v.swapaxes(0, 1), "NHD"
        if self._rotates and at.on_gpu:
            raise UnsupportedError(
                f"[{self.op}] pos_encoding_mode: expected NONE or ALIBI on a GPU, got ROPE_LLAMA: "
                "call apply_rope_pos_ids before the append"
            )
        if self._rotates and not isinstance(k, PagedKv) and not isinstance(v, PagedKv):
            queries, k, v = self._rotate(queries, k, v, layout, pool)
            layout, target = "NHD", np.empty(shape, np.float32)
        with errors_of(self.op):
            self._plan.run(
                queries,
                k,
                v,
                target,
                lse=sums,
                sm_scale=scale,
                logits_soft_cap=self.scores.logits_soft_cap or 0.0,
                lse_base=lse_base,
                alibi_slopes=self._slopes_of(at),
                k_scale=number_or_array(k_scale, f"[{self.op}] k_scale", at),
                v_scale=number_or_array(v_scale, f"[{self.op}] v_scale", at),
                sink_logits=self._sinks(at, sinks),
                layout=layout,
                pool=at.executor,
                **parts,
            )
        if target is not out_view:
            from_float32(target, out_view)
        return (given, given_sums) if return_lse else given

    def place(
        self, memory: _core.FixedPlans, first: "PlannedAttention | None", at: DevicePlace
    ) -> None:
        """Puts the plan where `first`, if there is one, was put: what belongs to its scores must be
        the same, as recordings of run() hold it."""
        if first is not None:
            same = self.scores == first.scores
            expect(same, f"[{self.op}] plan", "the scores of the first plan", "others")
            self._slopes_there = first._slopes_there
        with errors_of(self.op):
            self._plan.put(memory, at.executor)
        self._slopes_of(at)

    def _slopes_of(self, at: Place) -> AnyView | None:
        if self._slopes is None or not isinstance(at.executor, Queue):
            return self._slopes
        device = at.executor.device
        if device not in self._slopes_there:
            self._slopes_there[device] = DeviceArray.from_numpy(self._slopes, device)
        return self._slopes_there[device]

    def _queries(self, at: Place, q: Any) -> AnyView:
        argument = f"[{self.op}] q"
        queries = at.view(q, argument)
        rows = int(self._sequences.qo_indptr[-1])
        shape = (rows, self.heads.num_qo_heads, self._q_dims)
        expect(queries.shape == shape, argument, f"shape {shape} of the plan", queries.shape)
        name = dtype_name(queries.dtype)
        ok = self._q_data_type in (None, name)
        expect(ok, argument, f"{self._q_data_type}, the plan's q_data_type", name)
        return contiguous_rows(queries)

    def _sinks(self, at: Place, sinks: Any) -> AnyView | None:
        if sinks is None:
            return None
        argument = f"[{self.op}] sinks"
        logits = at.dense(sinks, argument)
        name, heads = dtype_name(logits.dtype), self.heads.num_qo_heads
        expect(name == "float32", argument, "float32", name)
        expect(logits.shape == (heads,), argument, f"shape ({heads},)", logits.shape)
        return logits

    def _rotate(
        self, q: Array, k: Array, v: Array, layout: str, pool: ThreadPool | Queue | None
    ) -> tuple[Array, Array, Array]:
        scores, lists = self.scores, self._sequences
        theta = 1e4 if scores.rope_theta is None else scores.rope_theta
        factor = 1.0 if scores.rope_scale is None else scores.rope_scale

        def rotated(x: Array, name: str, positions: Indices) -> Array:
            rows = as_float32(x, f"[{self.op}] {name}")
            nothing = rows[:, :0]
            turned, _ = apply_rope_pos_ids(
                rows, nothing, positions, rope_scale=factor, rope_theta=theta, pool=pool
            )
            return turned

        return (
            rotated(q, "q", lists.query_positions()),
            rotated(lists.gather(k, layout), "k", lists.token_positions()),
            as_float32(lists.gather(v, layout), f"[{self.op}] v"),
        )


def plan_single(
    op: str,
    q_shape: tuple[int, ...],
    k: Any,
    v: Any,
    kv_layout: str,
    scores: Scores,
    at: Place = HOST,
    **plan: Any,
) -> tuple[PlannedAttention, Any, Any]:
    """The plan of one sequence with contiguous keys, and views of these."""
    one_of(kv_layout, LAYOUTS, f"[{op}] kv_layout")
    keys, values = view_3d(k, f"[{op}] k", at), view_3d(v, f"[{op}] v", at)
    tokens, heads = keys.shape[:2] if kv_layout == "NHD" else keys.shape[1::-1]
    expected = (*keys.shape[:2], values.shape[2])
    expect(values.shape == expected, f"[{op}] v", f"shape {expected}", values.shape)
    dim = q_shape[2]
    expect(keys.shape[2] == dim, f"[{op}] k", f"head_dim {dim} of q", keys.shape[2])
    planned = PlannedAttention(
        op,
        Sequences.single(q_shape[0], tokens),
        Heads(q_shape[1], heads, dim, values.shape[2]),
        scores,
        layout=kv_layout,
        **plan,
    )
    return planned, keys, values


def require_plan(planned: PlanT | None, op: str) -> PlanT:
    """What plan() has made. Throws InvalidArgumentError before it is called."""
    if planned is None:
        raise InvalidArgumentError(f"[{op}] run: expected plan() before run(), got none")
    return planned
