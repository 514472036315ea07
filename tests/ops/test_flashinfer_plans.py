"""FlashInfer's arguments of plan() and run(): by position, with their meaning, or refused."""

import inspect

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, UnsupportedError, ops
from tests.ops.batches import Paged, Shape, offsets, values_of
from tests.ops.reference import assert_attention, attend, seen
from tests.ops.test_decode import bf16_products

KV_LENS = [5, 17, 64, 301]
HEADS = (4, 2, 64)


def i32(*values):
    return np.array(values, np.int32)


def batch_of(seed=0, kv_lens=KV_LENS, **options):
    return Paged(np.random.default_rng(seed), kv_lens, 16, Shape(*HEADS), **options)


def decode(batch, *given, q=None, wrapper=None, run=None, **options):
    wrapper = wrapper or ops.BatchDecodeWithPagedKVCacheWrapper(None, batch.layout)
    wrapper.plan(*batch.lists, *HEADS, batch.page_size, *given, **options)
    q = batch.queries([options.get("q_len_per_req", 1)] * len(batch.kv_lens)) if q is None else q
    return q, *wrapper.run_return_lse(q, batch.cache, **(run or {}))


# The order in which FlashInfer 0.7 takes what it takes by position.
DECODE = """indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size
    pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type
    sm_scale rope_scale rope_theta non_blocking block_tables seq_lens fixed_split_size
    disable_split_kv q_len_per_req"""
FAST = """self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size
    pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type sm_scale
    rope_scale rope_theta non_blocking fixed_split_size disable_split_kv q_len_per_req
    global_override_indptr_cpu"""
MASKS = """custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction"""
TYPES = "rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking"
ITEMS = "prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr"
PAGED = f"""qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads
    num_kv_heads head_dim_qk page_size head_dim_vo {MASKS} sm_scale window_left logits_soft_cap
    {TYPES} {ITEMS} seq_lens seq_lens_q block_tables max_token_per_sequence max_sequence_kv
    fixed_split_size disable_split_kv uniform_q_len"""
RAGGED = f"""qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo {MASKS}
    window_left logits_soft_cap sm_scale {TYPES} {ITEMS} fixed_split_size disable_split_kv seq_lens
    seq_lens_q max_token_per_sequence max_sequence_kv v_indptr o_indptr uniform_q_len"""
MLA = """qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size
    causal sm_scale q_data_type kv_data_type use_profiler"""
MLA_RUN = """q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table
    return_lse_base_on_e o_scale"""
CASCADE = """qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len
    num_qo_heads num_kv_heads head_dim page_size causal pos_encoding_mode use_fp16_qk_reduction
    sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type"""
SINGLE_DECODE = """q k v kv_layout pos_encoding_mode use_tensor_cores q_scale k_scale v_scale
    window_left logits_soft_cap sm_scale rope_scale rope_theta return_lse"""
SINGLE_PREFILL = """q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask causal
    kv_layout pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap
    rope_scale rope_theta backend return_lse kv_cache_sf k_scale v_scale"""
BUFFERS = """float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf
    paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend"""
SPARSE = """indptr indices M N R C num_qo_heads num_kv_heads head_dim mask packed_mask causal
    pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta
    q_data_type kv_data_type o_data_type non_blocking"""


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (ops.BatchDecodeWithPagedKVCacheWrapper.plan, DECODE),
        (
            ops.BatchDecodeWithPagedKVCacheWrapper,
            """float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores
            paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer backend
            jit_args""",
        ),
        (
            ops.CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
            """workspace_buffer indptr_buffer indices_buffer last_page_len_buffer kv_layout
            use_tensor_cores""",
        ),
        (ops.fast_decode_plan, FAST),
        (ops.BatchPrefillWithPagedKVCacheWrapper.plan, PAGED),
        (
            ops.BatchPrefillWithPagedKVCacheWrapper,
            BUFFERS + " jit_args jit_kwargs variant_owns_mask",
        ),
        (ops.BatchPrefillWithRaggedKVCacheWrapper.plan, RAGGED),
        (
            ops.BatchPrefillWithRaggedKVCacheWrapper,
            """float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf kv_indptr_buf
            custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask""",
        ),
        (
            ops.BatchAttentionWithAttentionSinkWrapper,
            BUFFERS
            + """ pos_encoding_mode use_fp16_qk_reduction q_data_type kv_data_type head_dim_qk
            head_dim_vo window_left""",
        ),
        (ops.BatchMLAPagedAttentionWrapper.plan, MLA),
        (ops.BatchMLAPagedAttentionWrapper.run, MLA_RUN),
        (
            ops.BatchMLAPagedAttentionWrapper,
            """float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr
            backend""",
        ),
        (ops.MultiLevelCascadeAttentionWrapper.plan, CASCADE),
        (
            ops.MultiLevelCascadeAttentionWrapper,
            """num_levels float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf_arr
            paged_kv_indptr_buf_arr paged_kv_indices_buf_arr paged_kv_last_page_len_buf_arr""",
        ),
        (
            ops.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward,
            """unique_kv_indptr unique_kv_indices unique_kv_last_page_len num_qo_heads num_kv_heads
            head_dim page_size data_type""",
        ),
        (
            ops.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward,
            """q k_shared v_shared unique_kv_cache causal use_fp16_qk_reduction sm_scale rope_scale
            rope_theta""",
        ),
        (ops.single_decode_with_kv_cache, SINGLE_DECODE),
        (ops.single_prefill_with_kv_cache, SINGLE_PREFILL),
        (ops.BlockSparseAttentionWrapper.plan, SPARSE),
        (
            ops.get_batch_indices_positions,
            "append_indptr seq_lens nnz batch_indices positions",
        ),
    ],
)
def test_positions(function, names):
    parameters = inspect.signature(function).parameters.values()
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [name for name in by_position if name != "self" or "self" in names] == names.split()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_q_len_per_req(isa, layout, dtype, q_len):
    batch = batch_of(q_len, kv_dtype=dtype, layout=layout)
    rows = [q_len] * len(KV_LENS)
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper(None, layout)
    lists = (*batch.lists, *HEADS, 16)
    wrapper.plan(*lists, window_left=20, q_len_per_req=q_len, is_causal=q_len > 1)
    q = batch.queries(rows, dtype)
    out, lse = wrapper.run(q, batch.cache, return_lse=True, q_len_per_req=q_len, window_left=20)
    expected = batch.expected(q, rows, dtype, causal=True, window_left=20)
    options = {"dtype": dtype, "bf16_products": bf16_products(dtype, dtype)}
    assert_attention(values_of(out, dtype), lse, expected, **options)


def test_splits_change_no_bit(isa):
    """The arguments ask for what holds anyway: a row's bits do not depend on its batch."""
    batch = batch_of(1, [3000, 5, 700])
    q, out, lse = decode(batch)
    for options in ({"fixed_split_size": 7}, {"disable_split_kv": True}):
        same = decode(batch, q=q, **options)
        np.testing.assert_array_equal(same[1], out)
        np.testing.assert_array_equal(same[2], lse)
    first = batch.kv_indptr[:2], batch.kv_indices, batch.last_page_len[:1]
    alone = ops.BatchDecodeWithPagedKVCacheWrapper()
    alone.plan(*first, *HEADS, 16, fixed_split_size=3, disable_split_kv=True)
    np.testing.assert_array_equal(alone.run(q[:1], batch.cache), out[:1])


def test_by_position():
    batch = batch_of(2)
    q, out, lse = decode(batch, window_left=9, logits_soft_cap=5.0, sm_scale=0.3)
    types = "float32", "float32", "float32", None
    rest = True, None, batch.kv_len, 4, False, 1
    same = decode(batch, "NONE", 9, 5.0, *types, 0.3, None, None, *rest, q=q)
    np.testing.assert_array_equal(same[1], out)
    np.testing.assert_array_equal(same[2], lse)


def test_what_the_lists_say_twice():
    batch = batch_of(3)
    width = int(np.diff(batch.kv_indptr).max())
    tables = np.full((len(KV_LENS), width + 2), 99, np.int32)
    for s in range(len(KV_LENS)):
        pages = batch.kv_indices[batch.kv_indptr[s] : batch.kv_indptr[s + 1]]
        tables[s, : len(pages)] = pages
    lengths = torch.tensor(KV_LENS)
    q, out, _ = decode(batch)
    same = decode(batch, q=q, seq_lens=lengths.to(torch.uint32), block_tables=tables)
    np.testing.assert_array_equal(same[1], out)
    rows = [3] * len(KV_LENS)
    prefill = ops.BatchPrefillWithPagedKVCacheWrapper()
    agreeing = {
        "seq_lens": lengths,
        "seq_lens_q": torch.tensor(rows),
        "block_tables": torch.from_numpy(tables),
        "max_token_per_sequence": 3,
        "max_sequence_kv": 301,
        "uniform_q_len": 3,
        "o_data_type": "float32",
    }
    lists = (offsets(rows), *batch.lists, *HEADS, 16)
    prefill.plan(*lists, causal=True, **agreeing)
    q = batch.queries(rows)
    expected = batch.expected(q, rows, causal=True)
    assert_attention(prefill.run(q, batch.cache), None, expected)
    wrong = tables.copy()
    wrong[0, 0] += 1
    for name, value, message in (
        ("seq_lens", [5, 17, 64, 300], "expected the lengths of the lists"),
        ("seq_lens", [5], "expected the lengths of the lists"),
        ("seq_lens", [5.0], "expected integers"),
        ("seq_lens_q", [3, 3, 3, 2], "expected the lengths of the lists"),
        ("block_tables", wrong, "expected the pages of the lists"),
        ("block_tables", tables[:, :3], r"expected shape \[4, 19 or more\]"),
        ("max_token_per_sequence", 2, "expected 3 or more"),
        ("max_sequence_kv", 300, "expected 301 or more"),
        ("uniform_q_len", 2, "expected the query rows of every sequence"),
        ("fixed_split_size", 0, "expected a positive number of pages"),
        ("fixed_split_size", 2.5, "expected a positive number of pages"),
        ("disable_split_kv", 3, "expected a bool"),
    ):
        given = np.array(value) if isinstance(value, list) else value
        with pytest.raises(InvalidArgumentError, match=rf"^\[.*\] {name}: {message}"):
            prefill.plan(*lists, **{name: given})
    with pytest.raises(InvalidArgumentError, match="o_data_type: expected float16, the type of q"):
        prefill.plan(*lists, q_data_type="float16", o_data_type=torch.bfloat16)
    prefill.plan(*lists, o_data_type=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="q: expected bfloat16"):
        prefill.run(q, batch.cache)


def test_ragged_lists_twice():
    starts, rows = i32(0, 4, 9), i32(0, 2, 5)
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
    agreeing = {"v_indptr": starts, "o_indptr": rows, "seq_lens": i32(4, 5)}
    wrapper.plan(rows, starts, 4, 2, 64, seq_lens_q=i32(2, 3), max_sequence_kv=5, **agreeing)
    for name in ("v_indptr", "o_indptr"):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected the rows of k, or of q"):
            wrapper.plan(rows, starts, 4, 2, 64, **{name: i32(0, 3, 9)})
    with pytest.raises(InvalidArgumentError, match="seq_lens: expected the lengths"):
        wrapper.plan(rows, starts, 4, 2, 64, seq_lens=i32(4, 6))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_lse_layouts(layout):
    batch = batch_of(4, layout=layout)
    rows = [2, 1, 0, 5]
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper(None, layout)
    wrapper.plan(offsets(rows), *batch.lists, *HEADS, 16)
    q = batch.queries(rows)
    out, lse = wrapper.run(q, batch.cache, return_lse=True)
    same, heads_first = wrapper.run_return_lse(q, batch.cache, lse_layout="HN", enable_pdl=True)
    np.testing.assert_array_equal(same, out)
    np.testing.assert_array_equal(heads_first, lse.T)
    target = np.empty((4, 8), np.float32)
    given = wrapper.run(q, batch.cache, lse=target, return_lse=True, lse_layout="HN")
    assert given[1] is target
    np.testing.assert_array_equal(target, lse.T)
    with pytest.raises(InvalidArgumentError, match=r"lse: expected float32 \(4, 8\)"):
        wrapper.run(q, batch.cache, lse=target.T.copy(), return_lse=True, lse_layout="HN")
    with pytest.raises(InvalidArgumentError, match="lse_layout: expected NH or HN"):
        wrapper.run(q, batch.cache, lse_layout="TH")
    tensor = wrapper.run_return_lse(torch.from_numpy(q), batch.cache, lse_layout="HN")[1]
    assert isinstance(tensor, torch.Tensor)


def test_scales_of_one_element():
    batch = batch_of(5, kv_dtype="float16")
    q, out, _ = decode(batch, run={"q_scale": 0.5, "k_scale": 0.25, "v_scale": 2.0})
    scales = {
        "q_scale": torch.tensor([0.5]),
        "k_scale": torch.tensor(0.25),
        "v_scale": np.array([2.0], np.float32),
    }
    np.testing.assert_array_equal(decode(batch, q=q, run=scales)[1], out)
    with pytest.raises(InvalidArgumentError, match="k_scale: expected a number, got int64"):
        decode(batch, q=q, run={"k_scale": torch.tensor([2])})
    with pytest.raises(InvalidArgumentError, match="q_scale: expected a number"):
        decode(batch, q=q, run={"q_scale": torch.tensor([2.0, 1.0])})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_heads(isa, layout):
    rng = np.random.default_rng(6)
    q = rng.standard_normal((3, 4, 64), np.float32)
    k, v = rng.standard_normal((2, 50, 2, 64), np.float32)
    scales = np.array([0.5, 2.0], np.float32), np.array([[3.0], [0.25]], np.float32)
    given = (k, v) if layout == "NHD" else (k.swapaxes(0, 1), v.swapaxes(0, 1))
    out = ops.single_prefill_with_kv_cache(
        q, *given, None, *scales, "float32", None, None, True, layout, k_scale=1.5
    )
    keys = k * 1.5 * scales[0][:, None]
    expected = attend(q, keys, v * scales[1].reshape(2, 1), seen(3, 50, True))
    assert_attention(out, None, expected)
    single = ops.single_prefill_with_kv_cache
    with pytest.raises(InvalidArgumentError, match=r"scale_k: expected float32 \(2,\)"):
        single(q, k, v, scale_k=scales[0][:1])
    with pytest.raises(InvalidArgumentError, match="q: expected float16"):
        single(q, k, v, o_dtype=torch.float16)
    with pytest.raises(UnsupportedError, match=r"scale_q: expected None \(queries are float32"):
        single(q, k, v, scale_q=scales[0])


def test_refused_by_name():
    batch = batch_of(7)
    lists = (*batch.lists, *HEADS, 16)
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper()
    with pytest.raises(UnsupportedError, match=r"window_right: expected None \(a row sees no key"):
        wrapper.plan(*lists, window_right=3)
    for make, name in (
        (lambda **x: ops.BatchDecodeWithPagedKVCacheWrapper(**x), "jit_args"),
        (lambda **x: ops.BatchPrefillWithPagedKVCacheWrapper(**x), "jit_kwargs"),
        (lambda **x: ops.BatchPrefillWithRaggedKVCacheWrapper(**x), "variant_owns_mask"),
    ):
        with pytest.raises(
            UnsupportedError, match=rf"{name}: expected None \(kernels are compiled"
        ):
            make(**{name: [1]})
    wrapper.plan(*lists)
    q = batch.queries([1] * 4)
    for name, reason in (
        ("kv_cache_sf", "caches have no 4-bit floats"),
        ("skip_softmax_threshold_scale_factor", "attention is exact"),
        ("use_fp16_softmax", "sums are float32"),
        ("uses_spcompress", "attention is exact"),
        ("o_scale", "results have the type of the queries"),
    ):
        with pytest.raises(UnsupportedError, match=rf"^\[.*\] {name}: expected None \({reason}"):
            wrapper.run(q, batch.cache, **{name: 2.0})
    with pytest.raises(InvalidArgumentError, match="window_left: expected -1, the plan's, got 5"):
        wrapper.run(q, batch.cache, window_left=5)
    with pytest.raises(InvalidArgumentError, match="q_len_per_req: expected 1, the plan's, got 2"):
        wrapper.run(q, batch.cache, q_len_per_req=2)
    for options, message in (
        ({"q_len_per_req": 0}, "q_len_per_req: expected a positive number"),
        ({"q_len_per_req": 6}, "q_len_per_req: expected at most 5 tokens, got 6"),
        ({"is_causal": True}, "is_causal: expected False with q_len_per_req = 1"),
        ({"q_len_per_req": 2, "is_causal": False}, "is_causal: expected True"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            wrapper.plan(*lists, **options)


def test_refused_by_block_sparse_attention():
    wrapper = ops.BlockSparseAttentionWrapper()
    lists = (i32(0, 1), i32(0), 16, 16, 16, 16, *HEADS)
    for name in (
        "block_mask",
        "kv_block_lens",
        "q2k_indices",
        "q2k_num",
        "kv_splits",
        "use_clc",
        "q_scale",
        "k_scale",
        "v_scale",
    ):
        with pytest.raises(UnsupportedError, match=rf"^\[block_.*\] {name}: expected None \("):
            wrapper.plan(*lists, **{name: 3})
    with pytest.raises(TypeError, match="block_masks: no such argument"):
        wrapper.plan(*lists, block_masks=3)
    wrapper.plan(*lists, None, None, False, "NONE", False, None, 0.5, None, None, None, None)
    wrapper.reset_workspace_buffer(None, None)
    ops.VariableBlockSparseAttentionWrapper().reset_workspace_buffer(None, None)


def test_other_names():
    batch = batch_of(8)
    q, out, lse = decode(batch, window_left=30)
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper(None, "NHD", False, True)
    assert wrapper.use_tensor_cores
    assert not wrapper.is_cuda_graph_enabled
    wrapper.reset_workspace_buffer(np.zeros(8, np.uint8), np.zeros(8, np.uint8))
    wrapper.begin_forward(*batch.lists, *HEADS, 16, window_left=30)
    np.testing.assert_array_equal(wrapper.run(q, batch.cache), out)
    for options in ({}, {"global_override_indptr_cpu": batch.kv_indptr}):
        indptr = np.zeros(1, np.int32) if options else batch.kv_indptr
        rest = batch.lists[1:]
        ops.fast_decode_plan(wrapper, indptr, *rest, *HEADS, 16, "NONE", 30, **options)
        same = wrapper.run_return_lse(q, batch.cache)
        np.testing.assert_array_equal(same[0], out)
        np.testing.assert_array_equal(same[1], lse)
    ragged = ops.BatchPrefillWithRaggedKVCacheWrapper()
    ragged.plan(i32(0, 2), i32(0, 5), 4, 2, 64)
    arrays = [np.ones((n, h, 64), np.float32) for n, h in ((2, 4), (5, 2), (5, 2))]
    pair = ragged.run_return_lse(*arrays, lse_base="ln")
    np.testing.assert_array_equal(pair[0], ragged.run(*arrays))


def test_places_with_outputs():
    starts, lengths = i32(0, 2, 2, 5), i32(4, 3, 3)
    owners, places = np.full(7, 9, np.int32), np.full(7, 9, np.int32)
    given = ops.get_batch_indices_positions(starts, lengths, 7, owners, places)
    assert given[0] is owners and given[1] is places
    np.testing.assert_array_equal(owners, [0, 0, 2, 2, 2, -1, -1])
    np.testing.assert_array_equal(places, [2, 3, 0, 1, 2, 0, 0])
    new = ops.get_batch_indices_positions(torch.from_numpy(starts), lengths, 5)
    np.testing.assert_array_equal(new[0].numpy(), owners[:5])
    for name, value in (
        ("batch_indices", np.zeros(4, np.int32)),
        ("positions", np.zeros(5, np.int64)),
        ("positions", np.zeros(10, np.int32)[::2]),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected"):
            ops.get_batch_indices_positions(starts, lengths, 5, **{name: value})
