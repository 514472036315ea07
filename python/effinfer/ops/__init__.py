"""The operators by themselves: arrays in, arrays of the same kind out, no model needed.

Arrays are numpy's, torch's or of any library with DLPack (`effinfer.ops.shared.arrays`), read where
they lie; operators that are not said to take strides copy what is not C-contiguous. Elements are
float32 unless said otherwise. Every operator takes `pool`, a `ThreadPool` to run on (default: one
for the process), and releases the GIL while it works; many run on arrays of a GPU, too, in the
order of a stream (`effinfer.ops.shared.places`). Errors: `InvalidArgumentError` names the argument,
what was expected and what was given.
"""

from effinfer._core import PackedMatrix, PagedKv, ThreadPool
from effinfer.ops.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from effinfer.ops.attention import kv_append, paged_attention, rope_append
from effinfer.ops.block_scores import block_score_index, page_bounds, topk_pages
from effinfer.ops.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from effinfer.ops.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from effinfer.ops.drawn_visits import hash_visits
from effinfer.ops.elementwise import (
    add,
    embedding,
    gelu,
    gelu_tanh,
    mul,
    relu_squared,
    scale,
    select_rows,
    sigmoid,
    silu,
    softcap,
)
from effinfer.ops.graph_decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from effinfer.ops.index import BlockIndex, a_shape_index, sampled_index, vertical_slash_index
from effinfer.ops.logits_pipe import (
    LogitsPipe,
)
from effinfer.ops.matmul import pack, quantize_activation, quantize_tokens, quantized_matmul
from effinfer.ops.mla import BatchMLAPagedAttentionWrapper
from effinfer.ops.norm import (
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    rmsnorm,
)
from effinfer.ops.norm_quantize import fused_add_rmsnorm_quant, layernorm_quant, rmsnorm_quant
from effinfer.ops.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from effinfer.ops.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from effinfer.ops.quantization import packbits, segment_packbits
from effinfer.ops.ragged import BatchPrefillWithRaggedKVCacheWrapper
from effinfer.ops.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from effinfer.ops.rope_quantize import (
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from effinfer.ops.rope_tables import rope_frequencies, rope_table
from effinfer.ops.sampling import (
    apply_token_bitmask,
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from effinfer.ops.scores import attention_scores, pooled_attention_scores
from effinfer.ops.shared.arrays import bfloat16, float8_e4m3fn, float8_e5m2
from effinfer.ops.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from effinfer.ops.sinks import BatchAttentionWithAttentionSinkWrapper
from effinfer.ops.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from effinfer.ops.topk import TopKTieBreak, top_k_page_table_transform, top_k_ragged_transform
from effinfer.ops.tree import tree_attention
from effinfer.ops.visits import Visits, block_visits, column_visits, key_visits, page_visits

__all__ = [
    "BlockIndex",
    "a_shape_index",
    "attention_scores",
    "block_score_index",
    "page_bounds",
    "page_visits",
    "hash_visits",
    "key_visits",
    "pooled_attention_scores",
    "block_visits",
    "column_visits",
    "sampled_index",
    "topk_pages",
    "vertical_slash_index",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "LogitsPipe",
    "MultiLevelCascadeAttentionWrapper",
    "PackedMatrix",
    "PagedKv",
    "Visits",
    "ThreadPool",
    "TopKTieBreak",
    "VariableBlockSparseAttentionWrapper",
    "add",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "apply_token_bitmask",
    "bfloat16",
    "chain_speculative_sampling",
    "embedding",
    "float8_e4m3fn",
    "float8_e5m2",
    "fast_decode_plan",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "kv_append",
    "layernorm",
    "layernorm_quant",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_sampling_from_probs",
    "mla_rope_quantize_fp8",
    "mul",
    "pack",
    "packbits",
    "paged_attention",
    "quantize_activation",
    "quantize_tokens",
    "quantized_matmul",
    "relu_squared",
    "rmsnorm",
    "rmsnorm_quant",
    "rope_append",
    "rope_frequencies",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
    "rope_table",
    "sampling_from_logits",
    "sampling_from_probs",
    "scale",
    "segment_packbits",
    "select_rows",
    "sigmoid",
    "silu",
    "silu_and_mul",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "softcap",
    "softmax",
    "top_k",
    "top_k_mask_logits",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "tree_attention",
]
