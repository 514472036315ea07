"""Multi-head latent attention over a paged cache, named as in FlashInfer."""

from typing import Any

import numpy as np

from effinfer._core import ThreadPool
from effinfer.ops.page import mla_pages
from effinfer.ops.shared.arrays import view
from effinfer.ops.shared.options import Scores, contiguous_rows, expect, indices, indptr
from effinfer.ops.shared.planned import PlannedAttention, require_plan
from effinfer.ops.shared.sequences import Heads, Sequences


class BatchMLAPagedAttentionWrapper:
    """Attention with keys and values compressed to one latent vector a token (DeepSeek-V2,
    arXiv:2405.04434, section 2.1): scores are q_nope ckv^T + q_pe kpe^T, values are ckv, and the
    caller has absorbed the projections into the queries."""

    _op = "batch_mla_paged_attention"

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        use_cuda_graph: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        self._planned: PlannedAttention | None = None
        self._kpe_shape: tuple[int, ...] = ()

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
    ) -> None:
        """Fixes the lists of the next runs, all int32: sequence b owns the rows qo_indptr[b] to
        qo_indptr[b + 1], its last tokens, and the pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
        with kv_len_arr[b] tokens.

        `sm_scale` has no default: it is 1 / sqrt of the head dimension before absorption.
        """
        op = f"[{self._op}]"
        pages = indptr(kv_indptr, f"{op} kv_indptr")
        rows = indptr(qo_indptr, f"{op} qo_indptr", pages.size)
        lengths = indices(kv_len_arr, f"{op} kv_len_arr")
        expect(page_size > 0, f"{op} page_size", "a positive number", page_size)
        room = np.diff(pages).astype(np.int64) * page_size
        ok = lengths.shape == room.shape and bool(((lengths >= 0) & (lengths <= room)).all())
        expect(ok, f"{op} kv_len_arr", f"{room.size} lengths, 0 to the pages' tokens", lengths.size)
        listed = indices(kv_indices, f"{op} kv_indices")
        ok = pages[-1] <= listed.size
        expect(ok, f"{op} kv_indptr", f"at most {listed.size}, the page indices", pages[-1])
        self._planned = PlannedAttention(
            self._op,
            Sequences(rows, pages, listed, lengths, page_size),
            Heads(num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv),
            Scores(sm_scale),
            q_data_type=q_data_type,
            rope_dims=head_dim_kpe,
            causal=causal,
        )
        self._kpe_shape = (int(rows[-1]), num_heads, head_dim_kpe)

    def run(
        self,
        q_nope: Any,
        q_pe: Any,
        ckv_cache: Any,
        kpe_cache: Any,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        pool: ThreadPool | None = None,
    ) -> Any:
        """Attention of q_nope [T, num_heads, head_dim_ckv] and q_pe [T, num_heads, head_dim_kpe]
        over ckv_cache [num_pages, page_size, head_dim_ckv] and kpe_cache [..., head_dim_kpe]: of
        q_nope's shape; with return_lse a pair with float32 [T, num_heads]."""
        op = f"[{self._op}]"
        planned = require_plan(self._planned, self._op)
        rotated = view(q_pe, f"{op} q_pe")
        ok = rotated.shape == self._kpe_shape
        expect(ok, f"{op} q_pe", f"shape {self._kpe_shape}", rotated.shape)
        latent = mla_pages(ckv_cache, f"{op} ckv_cache")
        keys = mla_pages(kpe_cache, f"{op} kpe_cache")
        expected = (*latent.shape[:3], self._kpe_shape[2])
        expect(keys.shape == expected, f"{op} kpe_cache", f"shape {expected}", keys.shape)
        return planned.run(
            q_nope,
            latent,
            latent,
            k_rope=keys,
            q_rope=contiguous_rows(rotated),
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            pool=pool,
        )
