"""What PyTorch and FlashInfer take for the cases of bench/gpu/, as JSON lines like its own.

Run by gpu.py with a Python that may have them; {"note": ...} says what is not there. Like there,
calls go through a CUDA graph, over inputs in turn that no cache holds.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

ROTATE_BYTES = 400e6
MOST_COPIES = 64
LEAST_CALLS = 8
REPLAYS = 12

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
TOKENS = (1, 4, 16, 64)
PROMPT_TOKENS = (512, 2048)
NORM_ROWS, NORM_COLS = (1, 64, 1024, 8192), 4096
PROMPT_LENGTH = 8192
BATCHES, CONTEXTS, GROUPS = (1, 8, 64), (1024, 8192, 65536), (1, 4, 8)
KV_HEADS, HEAD_DIM, PAGE = 8, 128, 64
SAMPLING_ROWS, SAMPLING_VOCAB = (1, 64), 128256


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def copies_of(size: float) -> int:
    return min(MOST_COPIES, max(1, math.ceil(ROTATE_BYTES / size)))


def median_us(torch: Any, copies: int, call: Callable[[int], Any]) -> float:
    """Of one of a row of calls, of which number i works on copy i."""
    calls = -(-LEAST_CALLS // copies) * copies
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what is set up at a first call cannot be captured
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % copies)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / calls)
    return float(sorted(times)[len(times) // 2])


def ceiling(torch: Any) -> None:
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    time = median_us(torch, 1, lambda _: a @ b)
    say(section="ceiling", flops=2 * size**3, median_us=time, peer="torch")


def matmuls(torch: Any) -> None:
    shapes = [*SHAPES, (30_000_000 // (2 * 4096) // 64 * 64, 4096)]
    for rows, cols in shapes:
        weights = [
            torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
            for _ in range(copies_of(2 * rows * cols))
        ]
        for n in (*TOKENS, *PROMPT_TOKENS):
            x = torch.randn(n, cols, device="cuda", dtype=torch.bfloat16)
            time = median_us(
                torch,
                len(weights),
                lambda i: torch.nn.functional.linear(x, weights[i]),  # noqa: B023
            )
            case = {"dtype": "bf16", "rows": rows, "cols": cols, "n": n}
            section = "matmul" if n in TOKENS else "prefill"
            say(section=section, **case, median_us=time, peer="torch (cuBLASLt)")


def norms(torch: Any) -> None:
    functional = torch.nn.functional
    weight = torch.ones(NORM_COLS, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[Any], Any]] = {
        "rms_norm": lambda x: functional.rms_norm(x, (NORM_COLS,), weight, 1e-6),
        "layer_norm": lambda x: functional.layer_norm(x, (NORM_COLS,), weight, weight, 1e-6),
    }
    for rows in NORM_ROWS:
        xs = [
            torch.randn(rows, NORM_COLS, device="cuda", dtype=torch.bfloat16)
            for _ in range(copies_of(4 * rows * NORM_COLS))
        ]
        for op, call in calls.items():
            time = median_us(torch, len(xs), lambda i: call(xs[i]))  # noqa: B023
            case = {"op": op, "rows": rows, "cols": NORM_COLS}
            say(section="norms", **case, median_us=time, peer="torch")


def flashinfer_call(
    torch: Any, flashinfer: Any, batch: int, context: int, group: int, kv: Any
) -> Callable[[int], Any]:
    pages = context // PAGE
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=group > 1
    )
    bounds = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    order = torch.randperm(batch * pages, device="cuda").to(torch.int32)
    last = torch.full((batch,), PAGE, dtype=torch.int32, device="cuda")
    heads = KV_HEADS * group
    wrapper.plan(
        bounds, order, last, heads, KV_HEADS, HEAD_DIM, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q = torch.randn(batch, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return lambda i: wrapper.run(q, kv[i])


def torch_call(torch: Any, batch: int, context: int, group: int, kv: Any) -> Callable[[int], Any]:
    """Of keys and values in one piece, which is less than pages ask for."""
    shape = (batch, KV_HEADS, context, HEAD_DIM)
    halves = [
        (one.view(-1)[: one.numel() // 2].view(shape), one.view(-1)[one.numel() // 2 :].view(shape))
        for one in kv
    ]
    q = torch.randn(batch, KV_HEADS * group, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda i: attend(q, *halves[i], enable_gqa=group > 1)


def attention(torch: Any, flashinfer: Any) -> None:
    for batch in BATCHES:
        for context in CONTEXTS:
            size = 4 * batch * context * KV_HEADS * HEAD_DIM
            if size > 0.4 * torch.cuda.mem_get_info()[0]:
                say(note=f"peers: batch {batch} of {context} tokens does not fit the device")
                continue
            shape = (batch * context // PAGE, 2, PAGE, KV_HEADS, HEAD_DIM)
            kv = [
                torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                for _ in range(copies_of(size))
            ]
            for group in GROUPS:
                case = {"batch": batch, "context": context, "group": group, "rows": 1}
                try:
                    if flashinfer is None:
                        peer = "torch sdpa"
                        call = torch_call(torch, batch, context, group, kv)
                    else:
                        peer = "flashinfer"
                        call = flashinfer_call(torch, flashinfer, batch, context, group, kv)
                    time = median_us(torch, len(kv), call)
                except RuntimeError as error:
                    say(note=f"peers: {peer}, {case}: {str(error).splitlines()[0]}")
                    continue
                say(section="attention", **case, median_us=time, peer=peer)
            del kv
            torch.cuda.empty_cache()


def prompt_calls(torch: Any, flashinfer: Any, group: int) -> dict[str, Callable[[int], Any]]:
    """Causal attention of one prompt, of FlashInfer by each of its kernels, over its pages."""
    heads, tokens = KV_HEADS * group, PROMPT_LENGTH
    q = torch.randn(tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    if flashinfer is None:
        shape = (1, KV_HEADS, tokens, HEAD_DIM)
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        rows = q.transpose(0, 1)[None]
        attend = torch.nn.functional.scaled_dot_product_attention
        return {"torch sdpa": lambda _: attend(rows, k, v, is_causal=True, enable_gqa=group > 1)}
    pages = tokens // PAGE
    kv = torch.randn(pages, 2, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    rows, bounds = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (tokens, pages))
    order = torch.randperm(pages, device="cuda").to(torch.int32)
    last = torch.tensor([PAGE], dtype=torch.int32, device="cuda")
    calls: dict[str, Callable[[int], Any]] = {}
    for backend in ("fa2", "fa3"):
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(
            rows, bounds, order, last, heads, KV_HEADS, HEAD_DIM, PAGE,
            causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        calls[f"flashinfer {backend}"] = lambda _, run=wrapper.run: run(q, kv)
    return calls


def prompts(torch: Any, flashinfer: Any) -> None:
    for group in GROUPS:
        case = {"batch": 1, "context": PROMPT_LENGTH, "group": group, "density": 1.0}
        try:
            for peer, call in prompt_calls(torch, flashinfer, group).items():
                say(section="prompts", **case, median_us=median_us(torch, 1, call), peer=peer)
        except RuntimeError as error:
            say(note=f"peers: prompts, {case}: {str(error).splitlines()[0]}")


def sampling(torch: Any, flashinfer: Any) -> None:
    """From logits: where FlashInfer takes probabilities their softmax is part of the call."""
    if flashinfer is None:
        return
    of = flashinfer.sampling
    calls: dict[str, Callable[[Any], Any]] = {
        "draw": of.sampling_from_logits,
        "top_k 50": lambda x: of.top_k_sampling_from_probs(torch.softmax(x, -1), 50),
        "top_p 0.9": lambda x: of.top_p_sampling_from_probs(torch.softmax(x, -1), 0.9),
        "top_k 50, top_p 0.9": lambda x: of.top_k_top_p_sampling_from_logits(x, 50, 0.9),
    }
    for rows in SAMPLING_ROWS:
        copies = copies_of(4 * rows * SAMPLING_VOCAB)
        logits = [2 * torch.randn(rows, SAMPLING_VOCAB, device="cuda") for _ in range(copies)]
        for op, call in calls.items():
            case = {"op": op, "rows": rows, "cols": SAMPLING_VOCAB}
            try:
                time = median_us(torch, copies, lambda i: call(logits[i]))  # noqa: B023
            except RuntimeError as error:
                say(note=f"peers: flashinfer, {case}: {str(error).splitlines()[0]}")
                continue
            say(section="sampling", **case, median_us=time, peer="flashinfer")


def main() -> int:
    try:
        import torch
    except ImportError:
        say(note=f"peers: no PyTorch in {sys.executable}")
        return 0
    if not torch.cuda.is_available():
        say(note=f"peers: the PyTorch of {sys.executable} has no CUDA device")
        return 0
    try:
        import flashinfer
    except ImportError:
        flashinfer = None
        say(note=f"peers: no FlashInfer in {sys.executable}: attention beside PyTorch's, unpaged")
    torch.set_grad_enabled(False)
    torch.backends.cuda.preferred_blas_library(
        "cublaslt"
    )  # else plain products are cuBLAS's choice
    ceiling(torch)
    matmuls(torch)
    norms(torch)
    attention(torch, flashinfer)
    prompts(torch, flashinfer)
    sampling(torch, flashinfer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
