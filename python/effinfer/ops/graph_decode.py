"""Decode attention with lists of fixed sizes, and its planning, named as in FlashInfer."""

from typing import Any

from effinfer.ops.decode import BatchDecodeWithPagedKVCacheWrapper


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph=True`."""

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Any,
        indices_buffer: Any,
        last_page_len_buffer: Any,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
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
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Any = None,
) -> None:
    """plan() of a `BatchDecodeWithPagedKVCacheWrapper`, which needs no faster one here: lists are
    read where they lie. `global_override_indptr_cpu` stands for `indptr`."""
    override = global_override_indptr_cpu
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr if override is None else override,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
