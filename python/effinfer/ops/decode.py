"""Attention of one new token for each sequence, named as in FlashInfer.

Caches are NHD [num_pages, page_size, num_kv_heads, head_dim] or HND [num_pages, num_kv_heads,
page_size, head_dim]: a tuple (k, v) of them, or one array [num_pages, 2, ...]. q is float32,
float16 or bfloat16; caches are those, an 8-bit float or int8. num_qo_heads is a multiple of
num_kv_heads.

Scores are q k^T * sm_scale (default 1 / sqrt(head_dim)), then, where asked for, ALiBi's bias and
cap * tanh(score / cap). A query sees keys at most `window_left` tokens before it; -1: all. `lse` is
the log-sum-exp of its scores, in base 2 unless `lse_base="ln"`. A query without keys gives zeros
and -infinity.

Workspace buffers and the options of CUDA kernels (use_tensor_cores, use_fp16_qk_reduction, backend,
enable_pdl, non_blocking) are accepted and have no effect. With `use_cuda_graph` plan() copies its
lists to the buffers of the constructor, whose sizes are those of every batch.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.flashinfer import check_agreement, check_splits, query_type, run_planned
from effinfer.ops.shared.options import Scores, expect, kv_views, unsupported
from effinfer.ops.shared.places import place_of
from effinfer.ops.shared.planned import PlannedAttention, require_plan
from effinfer.ops.shared.sequences import Heads, Sequences
from effinfer.ops.shared.wrapper import FixedBuffers, Wrapper
from effinfer.ops.single import single_decode_with_kv_cache

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "single_decode_with_kv_cache"]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Decode attention of a batch over a paged cache: plan() once a step, run() once a layer."""

    _op = "batch_decode_with_paged_kv_cache"

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        """Args:
        paged_kv_indptr_buffer: int32 [B + 1], paged_kv_indices_buffer: int32 [pages at most],
            paged_kv_last_page_len_buffer: int32 [B]; with use_cuda_graph every batch has B
            sequences, and plan() copies its lists to these.
        """
        self._start(kv_layout, jit_args=jit_args)
        self._use_tensor_cores = use_tensor_cores
        self._q_len: int | None = None
        if use_cuda_graph:
            self._buffers = FixedBuffers(
                self._op,
                on_gpu=True,
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
            self._buffers.same_size("paged_kv_indptr_buffer", "paged_kv_last_page_len_buffer", 1)

    @property
    def use_tensor_cores(self) -> bool:
        """As the constructor was told."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """Fixes the lists of the next runs; `effinfer.ops.shared.flashinfer` has the meaning of the
        arguments that are not named here.

        Args:
            indptr: int32 [B + 1]: sequence b has the pages indices[indptr[b]:indptr[b + 1]].
            indices: int32 [indptr[B] or more].
            last_page_len: int32 [B]: tokens in the last page, 1 to page_size.
            q_data_type: refuses other queries; default: what run() is given. `data_type` is its
                old name.
            q_len_per_req: query rows of every sequence, its last tokens; more than one see keys up
                to their own place (`is_causal` says the same). No sequence is shorter.
        """
        names = ("indptr", "indices", "last_page_len")
        pages = (indptr, indices, last_page_len)
        sequences = Sequences.paged(self._op, None, *pages, page_size, names)
        unsupported(self._op, window_right=window_right)
        check_splits(self._op, fixed_split_size, disable_split_kv)
        sequences = self._rows_of(sequences, q_len_per_req, is_causal)
        check_agreement(self._op, sequences, seq_lens=seq_lens, block_tables=block_tables)
        given = data_type if q_data_type is None else q_data_type
        planned = PlannedAttention(
            self._op,
            sequences,
            Heads(num_qo_heads, num_kv_heads, head_dim, head_dim),
            Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
            layout=self._layout,
            q_data_type=query_type(self._op, given, o_data_type),
            window_left=window_left,
            causal=q_len_per_req > 1,
            decode=True,
        )
        self._keep(sequences, last_page_len, q_len_per_req)
        if self._buffers is not None:
            self._buffers.place(planned, "paged_kv_indices_buffer")
        self._planned = planned

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sinks: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        q_len_per_req: int | None = None,
        pool: ThreadPool | Queue | None = None,
        **options: Any,
    ) -> Any:
        """Attention of q [B * q_len_per_req, num_qo_heads, head_dim], of the same kind, shape and
        dtype; with return_lse a pair with float32 [B * q_len_per_req, num_qo_heads].

        Args:
            k_scale, v_scale: what stored keys and values are multiplied by: a number, or float32 of
                the cache's shape without head_dim, one for each token and head.
            sinks: float32 [num_qo_heads]: the logit, neither scaled nor capped, of one more key
                whose value is zero; `lse` has it too.
            out, lse: where results go; C-contiguous.
            options: of `effinfer.ops.shared.flashinfer.run_planned`.
        """
        planned = require_plan(self._planned, self._op)
        ok = q_len_per_req in (None, self._q_len)
        expect(ok, f"[{self._op}] q_len_per_req", f"{self._q_len}, the plan's", q_len_per_req)
        at = place_of(q, pool, f"[{self._op}] q")
        k, v = kv_views(self._op, paged_kv_cache, self._layout, at=at)
        return run_planned(
            planned,
            q,
            k,
            v,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            pool=pool,
            **options,
        )

    def _rows_of(self, pages: Sequences, count: int, is_causal: bool | None) -> Sequences:
        """The sequences with `count` query rows each."""
        op = f"[{self._op}]"
        expect(count >= 1, f"{op} q_len_per_req", "a positive number", count)
        ok = is_causal in (None, count > 1)
        expect(ok, f"{op} is_causal", f"{count > 1} with q_len_per_req = {count}", is_causal)
        if count == 1:
            return pages
        shortest = int(pages.kv_len.min(initial=count))
        expect(shortest >= count, f"{op} q_len_per_req", f"at most {shortest} tokens", count)
        return replace(pages, qo_indptr=pages.qo_indptr * np.int32(count))

    def _keep(self, sequences: Sequences, last_page_len: Any, q_len: int) -> None:
        if self._buffers is not None:
            ok = self._q_len in (None, q_len)
            expect(ok, f"[{self._op}] q_len_per_req", f"{self._q_len}, the first plan's", q_len)
            self._buffers.batch("paged_kv_last_page_len_buffer", sequences.kv_len.size)
            self._buffers.keep(
                paged_kv_indptr_buffer=sequences.kv_indptr,
                paged_kv_indices_buffer=sequences.listed_pages,
                paged_kv_last_page_len_buffer=last_page_len,
            )
        self._q_len = q_len
