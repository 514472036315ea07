"""The operators by themselves: numpy arrays in, new numpy arrays out, no model needed.

Arrays are float32 unless said otherwise; arrays that are not C-contiguous are copied first. Every
operator takes `pool`, a `ThreadPool` to run on (default: one for the process), and releases the
GIL while it works. Errors: `InvalidArgumentError` names the argument, what was expected and what
was given.
"""

from effinfer._core import PackedMatrix, PagedKv, ThreadPool
from effinfer.ops.arrays import bfloat16, float8_e4m3fn, float8_e5m2
from effinfer.ops.attention import kv_append, paged_attention, rope_append
from effinfer.ops.cascade import (
    merge_state,
    merge_state_in_place,
    merge_states,
)
from effinfer.ops.elementwise import (
    add,
    add_rms_norm,
    embedding,
    gelu_tanh,
    mul,
    relu_squared,
    rms_norm,
    scale,
    select_rows,
    silu,
    softcap,
)
from effinfer.ops.logits_pipe import (
    LogitsPipe,
)
from effinfer.ops.matmul import matmul, pack, quantize_activation
from effinfer.ops.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from effinfer.ops.rope import rope, rope_frequencies, rope_table
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

__all__ = [
    "LogitsPipe",
    "PackedMatrix",
    "PagedKv",
    "ThreadPool",
    "add",
    "add_rms_norm",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_token_bitmask",
    "bfloat16",
    "chain_speculative_sampling",
    "embedding",
    "float8_e4m3fn",
    "float8_e5m2",
    "gelu_tanh",
    "get_batch_indices_positions",
    "get_seq_lens",
    "kv_append",
    "matmul",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_sampling_from_probs",
    "mul",
    "pack",
    "paged_attention",
    "quantize_activation",
    "relu_squared",
    "rms_norm",
    "rope",
    "rope_append",
    "rope_frequencies",
    "rope_table",
    "sampling_from_logits",
    "sampling_from_probs",
    "scale",
    "select_rows",
    "silu",
    "softcap",
    "softmax",
    "top_k",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]
