"""Block-sparse attention of one sequence over contiguous keys, named as in FlashInfer; `decode`
describes scores, `lse` and the arguments that have no effect.

The attention matrix of M query rows and N keys is cut into blocks; only the listed ones are
visited, and cost is proportional to them. `causal` is that of the whole matrix: row i sees the keys
up to N - M + i.
"""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import Array
from effinfer.ops.shared.flashinfer import query_type
from effinfer.ops.shared.options import Scores, expect, indices, unsupported, view_3d
from effinfer.ops.shared.places import place_of, to_host
from effinfer.ops.shared.planned import PlannedAttention, require_plan
from effinfer.ops.shared.sequences import Heads, Sequences


class BlockSparseAttentionWrapper:
    """Blocks of R rows and C columns, the same for every head: a BSR matrix as of scipy."""

    _op = "block_sparse_attention"

    def __init__(self, float_workspace_buffer: Any = None, backend: str = "auto") -> None:
        self._planned: PlannedAttention | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Takes other workspaces, which have no effect."""

    def plan(
        self,
        indptr: Any,
        indices: Any,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Any = None,
        packed_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        **refused: Any,
    ) -> None:
        """Fixes the blocks of the next runs.

        Args:
            indptr: int32 [M / R + 1]; indices: int32 [nnz]: block row i visits the block columns
                indices[indptr[i]:indptr[i + 1]], in any order, none twice.
            M, N: query rows and keys, multiples of R and C.
            mask: bool [nnz, R, C], which elements of the blocks count; takes the place of causal.
            packed_mask: the same as bits, lowest first: block row after block row, each from a new
                byte, [R, its blocks, C].
            refused: what other kernels of FlashInfer take; `UnsupportedError`.
        """
        unsupported(self._op, **refused)
        matrix = (*_matrix(self._op, indptr, indices), M, N, R, C)
        masked = mask is not None or packed_mask is not None
        list_indptr, spans, lists, span_masks = _core.block_sparse_lists(
            *matrix, num_kv_heads, masked=masked
        )
        options: dict[str, Any] = {"causal": causal}
        if packed_mask is not None:
            bits = _core.block_mask(*matrix, to_host(packed_mask, f"[{self._op}] packed_mask"))
        elif mask is not None:
            bits = _pack_blocks(self._op, mask, (len(matrix[1]), R, C))
        if masked:
            options = {"mask": bits, "span_masks": span_masks, "mask_row_stride": C}
        self._planned = PlannedAttention(
            self._op,
            Sequences.single(M, N),
            Heads(num_qo_heads, num_kv_heads, head_dim, head_dim),
            Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
            q_data_type=query_type(self._op, q_data_type, o_data_type),
            blocks=(list_indptr, spans),
            lists=lists,
            **options,
        )

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale_q: float | None = None,
        scale_k: float | None = None,
        scale_v: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        *,
        lse_base: str = "log2",
        pool: ThreadPool | Queue | None = None,
    ) -> Any:
        """Attention of q [M, num_qo_heads, head_dim] over k and v [N, num_kv_heads, head_dim]; with
        return_lse a pair with float32 [M, num_qo_heads]."""
        planned = require_plan(self._planned, self._op)
        at = place_of(q, pool, f"[{self._op}] q")
        return planned.run(
            q,
            view_3d(k, f"[{self._op}] k", at),
            view_3d(v, f"[{self._op}] v", at),
            q_scale=scale_q,
            k_scale=scale_k,
            v_scale=scale_v,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            pool=pool,
        )


class VariableBlockSparseAttentionWrapper:
    """Blocks of any sizes, and other ones for every KV head."""

    _op = "variable_block_sparse_attention"

    def __init__(self, float_workspace_buffer: Any = None, backend: str = "auto") -> None:
        self._planned: PlannedAttention | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Takes other workspaces, which have no effect."""

    def plan(
        self,
        block_mask_map: Any,
        block_row_sz: Any,
        block_col_sz: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Any = None,
        kv_data_type: Any = None,
    ) -> None:
        """Fixes the blocks of the next runs.

        Args:
            block_mask_map: bool [num_kv_heads, MB, NB]: which blocks are visited.
            block_row_sz: int32 [num_kv_heads, MB], rows of the blocks; block_col_sz: int32
                [num_kv_heads, NB], their columns. Every head's add up to the same numbers.
        """
        op = f"[{self._op}]"
        block_map = to_host(block_mask_map, f"{op} block_mask_map")
        ok = block_map.ndim == 3 and block_map.shape[0] == num_kv_heads
        expect(ok, f"{op} block_mask_map", f"shape [{num_kv_heads}, MB, NB]", block_map.shape)
        (list_indptr, spans, lists, _), rows, columns = _core.variable_block_lists(
            block_map if block_map.dtype == np.bool_ else block_map != 0,
            _sizes(block_row_sz, f"{op} block_row_sz"),
            _sizes(block_col_sz, f"{op} block_col_sz"),
        )
        self._planned = PlannedAttention(
            self._op,
            Sequences.single(rows, columns),
            Heads(num_qo_heads, num_kv_heads, head_dim, head_dim),
            Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
            layout="HND",
            q_data_type=q_data_type,
            blocks=(list_indptr, spans),
            lists=lists,
            causal=causal,
        )

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        *,
        lse_base: str = "log2",
        pool: ThreadPool | Queue | None = None,
    ) -> Any:
        """Attention of q [num_qo_heads, rows, head_dim] over k and v [num_kv_heads, columns,
        head_dim], heads first; with return_lse a pair with float32 [num_qo_heads, rows]."""
        planned = require_plan(self._planned, self._op)
        at = place_of(q, pool, f"[{self._op}] q")
        queries = view_3d(q, f"[{self._op}] q", at)
        given, out_view = at.result(q, queries.shape, None, out, f"[{self._op}] out")
        keys = view_3d(k, f"[{self._op}] k", at)
        values = view_3d(v, f"[{self._op}] v", at)
        rows, sums = planned.run(
            queries.swapaxes(0, 1),
            keys,
            values,
            return_lse=True,
            lse_base=lse_base,
            pool=at.executor,
        )
        _core.convert_rows(rows.swapaxes(0, 1), out_view, op=self._op, pool=at.executor)
        if not return_lse:
            return given
        shape = queries.shape[:2]
        given_sums, sums_view = at.result(q, shape, np.float32, lse, f"[{self._op}] lse")
        turned = sums.swapaxes(0, 1)[..., None]
        _core.convert_rows(turned, sums_view[..., None], op=self._op, pool=at.executor)
        return given, given_sums


def _matrix(op: str, offsets: Any, columns: Any) -> tuple[Array, Array]:
    return indices(offsets, f"[{op}] indptr"), indices(columns, f"[{op}] indices")


def _pack_blocks(op: str, mask: Any, shape: tuple[int, ...]) -> Array:
    blocks = to_host(mask, f"[{op}] mask")
    ok = blocks.shape == shape and blocks.dtype in (np.bool_, np.uint8)
    expect(ok, f"[{op}] mask", f"bool {shape}", f"{blocks.dtype} {blocks.shape}")
    return np.packbits(blocks.reshape(-1) != 0, bitorder="little")


def _sizes(x: Any, argument: str) -> Array:
    """Sizes as int32, of any shape."""
    sizes = to_host(x, argument)
    return indices(sizes.reshape(-1), argument).reshape(sizes.shape)
