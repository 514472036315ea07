"""Single operators of torch: dense weights, and its attention."""

from typing import Any

import torch
from protocol import serve
from timing import median_seconds

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
LAYERS = 4


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(request["threads"])
        torch.manual_seed(0)
        return {"seconds": 0.0, "version": torch.__version__}

    @torch.inference_mode()
    def matmul(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["dtype"] not in DTYPES:
            raise ValueError(f"torch has no {request['dtype']}")
        dtype, side = DTYPES[request["dtype"]], request["side"]
        weight = torch.randn(side, side).to(dtype)
        x = torch.randn(request["n"], side).to(dtype)
        call = lambda: torch.nn.functional.linear(x, weight)  # noqa: E731
        return {"seconds": median_seconds(call, request["seconds"])}

    @torch.inference_mode()
    def attention(self, request: dict[str, Any]) -> dict[str, Any]:
        rows, length, dim = request["n"], request["length"], request["head_dim"]
        q = torch.randn(1, request["heads"], rows, dim).bfloat16()
        layers = [
            torch.randn(1, request["kv_heads"], length, dim).bfloat16() for _ in range(LAYERS)
        ]
        mask = None
        if rows > 1:  # the last row sees every position
            mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)

        def all_layers() -> None:
            for kv in layers:
                torch.nn.functional.scaled_dot_product_attention(
                    q, kv, kv, attn_mask=mask, enable_gqa=True
                )

        return {"seconds": median_seconds(all_layers, request["seconds"]) / LAYERS}

    @torch.inference_mode()
    def sampling(self, request: dict[str, Any]) -> dict[str, Any]:
        """As inference engines do it in torch: sort, mask, softmax, cumulative sum, multinomial."""
        logits = torch.randn(request["batch"], request["vocab"]) * request["spread"]
        top_k, top_p = request["top_k"], request["top_p"]

        def call() -> torch.Tensor:
            ranked, ids = logits.sort(dim=-1, descending=True)
            if top_k is not None:
                ranked[:, top_k:] = -torch.inf
            probs = ranked.softmax(dim=-1)
            probs[probs.cumsum(dim=-1) - probs > top_p] = 0.0
            return ids.gather(1, torch.multinomial(probs, 1))

        return {"seconds": median_seconds(call, request["seconds"])}

    @torch.inference_mode()
    def library(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["case"] not in ("prefill", "decode"):
            raise ValueError("torch has no such operator")
        dtype = torch.bfloat16 if request["dtype"] == "bf16" else torch.float32
        batch, dim, length = request["batch"], request["head_dim"], request["length"]
        q = torch.randn(batch, request["heads"], request["rows"], dim).to(dtype)
        kv = torch.randn(batch, request["kv_heads"], length, dim).to(dtype)
        causal = request["case"] == "prefill"

        def call() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, kv, kv, is_causal=causal, enable_gqa=True
            )

        return {"seconds": median_seconds(call, request["seconds"])}


if __name__ == "__main__":
    worker = Worker()
    names = ("load", "matmul", "attention", "sampling", "library")
    serve({name: getattr(worker, name) for name in names})
