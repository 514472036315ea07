"""Multi-head latent attention over a paged cache, named as in FlashInfer."""

from typing import Any

import numpy as np

from effinfer._core import Queue, ThreadPool
from effinfer.ops.page import mla_pages
from effinfer.ops.shared.flashinfer import query_type
from effinfer.ops.shared.latent import expect_shape, parts_of, scaled_queries, scales_of
from effinfer.ops.shared.options import (
    Scores,
    expect,
    indices,
    indptr,
    one_of,
    unsupported,
    view_3d,
)
from effinfer.ops.shared.places import place_of
from effinfer.ops.shared.planned import PlannedAttention, require_plan
from effinfer.ops.shared.sequences import Heads, Sequences
from effinfer.ops.shared.wrapper import FixedBuffers, Wrapper

_LSE_BASES = {"none": "log2", "base2": "log2", "basee": "ln"}


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attention with keys and values compressed to one latent vector a token (DeepSeek-V2,
    arXiv:2405.04434, section 2.1): scores are q_nope ckv^T + q_pe kpe^T, values are ckv, and the
    caller has absorbed the projections into the queries."""

    _op = "batch_mla_paged_attention"

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
    ) -> None:
        """Args:
        qo_indptr, kv_indptr: int32 [B + 1], kv_indices: int32 [pages at most], kv_len_arr: int32
            [B]; with use_cuda_graph every batch has B sequences, and plan() copies its lists to
            these.
        """
        self._start("NHD")
        self._dims = (0, 0, 0)
        self._lse_base = "log2"
        self._use_sinks = False
        self._rows = 0
        if use_cuda_graph:
            self._buffers = FixedBuffers(
                self._op,
                on_gpu=True,
                qo_indptr=qo_indptr,
                kv_indptr=kv_indptr,
                kv_indices=kv_indices,
                kv_len_arr=kv_len_arr,
            )

    def plan(
        self,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        num_heads: int = 0,
        head_dim_ckv: int = 0,
        head_dim_kpe: int = 0,
        page_size: int = 0,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        cum_seq_lens_q: Any = None,
        block_tables: Any = None,
        seq_lens: Any = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: Any = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Fixes the lists of the next runs, all int32: sequence b owns the rows qo_indptr[b] to
        qo_indptr[b + 1], its last tokens, and the pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]]
        with kv_len_arr[b] tokens. All eight must be given, and nothing takes their place.

        `sm_scale` must be given: it is 1 / sqrt of the head dimension before absorption.
        `lse_mode` is the base of run()'s lse: "base2" or "basee"; `use_sinks` asks run() for them.
        run() takes any `query_layout` and `kv_cache_layout`, and scales in any `scale_mode` but
        those of "bmm". `use_profiler` has no effect.
        """
        op = f"[{self._op}]"
        unsupported(
            self._op,
            metadata=metadata,
            cum_seq_lens_q=cum_seq_lens_q,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_q_len=max_q_len,
            skip_softmax=skip_softmax,
        )
        for name, layout in (("query_layout", query_layout), ("kv_cache_layout", kv_cache_layout)):
            one_of(layout or "split", ("packed", "split"), f"{op} {name}")
        one_of(output_scale, ("none",), f"{op} output_scale")
        one_of(scale_mode, ("default", "kv-per-tensor"), f"{op} scale_mode")
        expect(sm_scale is not None, f"{op} sm_scale", "a number", sm_scale)
        sequences = self._sequences(qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size)
        one_of(lse_mode, tuple(_LSE_BASES), f"{op} lse_mode")
        planned = PlannedAttention(
            self._op,
            sequences,
            Heads(num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv),
            Scores(sm_scale),
            q_data_type=query_type(self._op, q_data_type, output_dtype),
            rope_dims=head_dim_kpe,
            causal=bool(causal),
        )
        if self._buffers is not None:
            self._buffers.batch("kv_len_arr", sequences.kv_len.size)
            self._keep(sequences, planned, self._buffers)
        self._planned = planned
        self._lse_base, self._use_sinks = _LSE_BASES[lse_mode], use_sinks
        self._rows, self._dims = (
            int(sequences.qo_indptr[-1]),
            (num_heads, head_dim_ckv, head_dim_kpe),
        )

    def _keep(self, sequences: Sequences, planned: PlannedAttention, buffers: FixedBuffers) -> None:
        buffers.keep(
            qo_indptr=sequences.qo_indptr,
            kv_indptr=sequences.kv_indptr,
            kv_indices=sequences.listed_pages,
            kv_len_arr=sequences.kv_len,
        )
        buffers.place(planned, "kv_indices")

    def _sequences(
        self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, page_size: int
    ) -> Sequences:
        op = f"[{self._op}]"
        for name, given in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            expect(given is not None, f"{op} {name}", "an array", None)
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
        return Sequences(rows, pages, listed, lengths, page_size)

    def run(
        self,
        q_nope: Any = None,
        q_pe: Any = None,
        ckv_cache: Any = None,
        kpe_cache: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Any = None,
        kpe_scale: float | None = None,
        sinks: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
        lse_base: str | None = None,
        pool: ThreadPool | Queue | None = None,
    ) -> Any:
        """Attention of q_nope [T, num_heads, head_dim_ckv] and q_pe [T, num_heads, head_dim_kpe]
        over ckv_cache [num_pages, page_size, head_dim_ckv] and kpe_cache [..., head_dim_kpe]: of
        q_nope's shape; with return_lse a pair with float32 [T, num_heads].

        Args:
            query, kv_cache: both parts as a pair, or as one array with the rotated part last, in
                the place of the four arrays.
            ckv_scale, kpe_scale: what stored numbers are multiplied by, 8-bit ones say.
            sinks: as of `BatchDecodeWithPagedKVCacheWrapper.run`.
            return_lse_base_on_e: `lse_base="ln"`; default: the plan's `lse_mode`.
        """
        op = f"[{self._op}]"
        unsupported(
            self._op,
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
            o_scale=o_scale,
            ckv_scale_arr=ckv_scale_arr,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
        )
        planned = require_plan(self._planned, self._op)
        ok = sinks is not None or not self._use_sinks
        expect(ok, f"{op} sinks", "an array, as the plan has use_sinks", None)
        heads, ckv, kpe = self._dims
        nope, rotated = parts_of(f"{op} query", query, (q_nope, q_pe), ckv)
        latent, keys = parts_of(f"{op} kv_cache", kv_cache, (ckv_cache, kpe_cache), ckv)
        at = place_of(nope, pool, f"{op} q_nope")
        pe = view_3d(rotated, f"{op} q_pe", at)
        expect_shape(pe, (self._rows, heads, kpe), f"{op} q_pe")
        pages = mla_pages(latent, f"{op} ckv_cache", at)
        turned = mla_pages(keys, f"{op} kpe_cache", at)
        expect_shape(turned, (*pages.shape[:3], kpe), f"{op} kpe_cache")
        factor, ratio = scales_of(op, ckv_scale, kpe_scale)
        base = "ln" if return_lse_base_on_e else self._lse_base
        return planned.run(
            nope,
            pages,
            pages,
            k_rope=turned,
            q_rope=scaled_queries(pe, ratio, f"{op} q_pe", at),
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=base if lse_base is None else lse_base,
            k_scale=factor,
            v_scale=factor,
            sinks=sinks,
            pool=pool,
        )
