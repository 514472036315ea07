"""torch's tensors on a GPU. The emulator has no torch: tensors of the test say that they lie on
"cuda:0", over the memory of DeviceArrays."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import effinfer
from effinfer import InvalidArgumentError, Queue, UnsupportedError, ops
from tests.ops.cuda.gpu_arrays import stream, there

STREAM = stream(31)
HAS_TORCH = torch.cuda.is_available()


class CudaTensor(torch.Tensor):
    is_cuda = True
    device = torch.device("cuda", 0)
    owner = None


def tensor_over(array, dtype):
    """A tensor over the array's memory, which the host must not touch."""
    address = array.__cuda_array_interface__["data"][0]
    size = int(np.prod(array.shape)) * torch.empty((), dtype=dtype).element_size()
    raw = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
    tensor = torch.from_numpy(raw).view(dtype).reshape(array.shape).as_subclass(CudaTensor)
    tensor.owner = array
    return tensor


def on_gpu(x):
    x = torch.as_tensor(x)
    if HAS_TORCH:
        return x.cuda()
    bits = x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return tensor_over(there(bits.view(np.float16) if x.dtype == torch.bfloat16 else bits), x.dtype)


def values(x):
    if HAS_TORCH:
        return x.cpu()
    Queue("cuda:0", STREAM).synchronize()
    return torch.from_numpy(np.array(x.owner.to_numpy())).view(x.dtype)


@pytest.fixture(autouse=True)
def cuda_of_torch(monkeypatch):
    if HAS_TORCH:
        return
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    plain = torch.empty

    def empty(shape, *, dtype=None, device=None):
        if device is None:
            return plain(shape, dtype=dtype)
        assert device == "cuda:0"
        numbers = {2: np.float16, 4: np.float32}[plain((), dtype=dtype).element_size()]
        made = effinfer.DeviceArray.empty(list(shape), np.dtype(numbers), Queue(device, STREAM))
        return tensor_over(made, dtype)

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_in_and_out_in_the_current_stream(dtype):
    x, weight = torch.randn(5, 64).to(dtype), torch.rand(64).to(dtype)
    given = on_gpu(x), on_gpu(weight)
    out = ops.rmsnorm(*given)
    assert isinstance(out, torch.Tensor)
    assert out.is_cuda
    assert out.dtype == dtype
    gated = ops.silu_and_mul(out)
    expected = ops.silu_and_mul(ops.rmsnorm(x, weight))
    torch.testing.assert_close(values(gated), expected, rtol=0.02, atol=1e-3)
    given_out = on_gpu(torch.zeros_like(x))
    assert ops.rmsnorm(*given, out=given_out) is given_out
    residual = on_gpu(torch.ones_like(x))
    ops.fused_add_rmsnorm(given[0], residual, given[1])
    torch.testing.assert_close(values(residual), x + 1)


def test_attention():
    q, k, v = (torch.randn(n, h, 64).to(torch.bfloat16) for n, h in ((3, 4), (40, 2), (40, 2)))
    expected, sums = ops.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    given = [on_gpu(x) for x in (q, k, v)]
    out, lse = ops.single_prefill_with_kv_cache(*given, causal=True, return_lse=True)
    torch.testing.assert_close(values(out), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(values(lse), sums, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling(dtype):
    logits = torch.randn(4, 50).to(dtype)
    given = on_gpu(logits)
    torch.manual_seed(3)
    drawn = ops.top_k_top_p_sampling_from_logits(given, 20, 0.9)
    assert drawn.dtype == torch.int32
    assert drawn.is_cuda
    torch.manual_seed(3)
    expected = ops.top_k_top_p_sampling_from_logits(logits, 20, 0.9)
    torch.testing.assert_close(values(drawn), expected)
    masked = values(ops.top_k_mask_logits(given, 3))
    torch.testing.assert_close(masked, ops.top_k_mask_logits(logits, 3))


def test_attention_over_chosen_keys():
    q, k, v = torch.randn(90, 4, 64), torch.randn(90, 2, 64), torch.randn(90, 2, 64)
    options = {"vertical_size": 9, "slash_size": 5, "local_tokens": 4, "last_q": 8}
    expected = torch.empty_like(q)
    ops.vertical_slash_index(q, k, **options).plan(64).run(q, k, v, expected)
    q, k, v = (on_gpu(x) for x in (q, k, v))
    index = ops.vertical_slash_index(q, k, **options)
    out = on_gpu(torch.zeros(90, 4, 64))
    index.plan(64).run(q, k, v, out)
    torch.testing.assert_close(values(out), expected)


def test_what_is_refused():
    x, weight = torch.randn(5, 64), torch.rand(64)
    with pytest.raises(
        InvalidArgumentError, match=r"\] weight: expected a tensor on cuda:0, got one"
    ):
        ops.rmsnorm(on_gpu(x), weight)
    with pytest.raises(UnsupportedError, match=r"\] weight: expected an array on cpu.*on cuda:0"):
        ops.rmsnorm(x, on_gpu(weight))
