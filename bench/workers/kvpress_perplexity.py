"""Perplexity behind a prompt whose keys kvpress dropped, in float32 by torch: a JSON request on
standard input, a JSON list of perplexities on standard output.

{"model": path of a GGUF file, "prompt": ids, "follows": ids, "methods": [[class, arguments], ...]};
a class of "" is all keys.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

# These look at the weights of attention, which other kernels do not give. KVComposePress chooses
# kernels itself.
SEES_WEIGHTS = ("ObservedAttentionPress",)


def perplexity(model: Any, press: Any, prompt: list[int], follows: list[int]) -> float:
    """Of what follows, fed token by token at the positions that it has in the text."""
    cache = DynamicCache()
    sees = type(press).__name__ in SEES_WEIGHTS
    model.set_attn_implementation("eager" if sees else "sdpa")
    with press(model) if press else contextlib.nullcontext():
        logits = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits
    model.set_attn_implementation("sdpa")
    total = 0.0
    for position, token in enumerate(follows, len(prompt)):
        total += float(torch.log_softmax(logits[0, -1].double(), -1)[token])
        place = torch.tensor([[position]])
        logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=place).logits
    return math.exp(-total / len(follows))


def main() -> None:
    request = json.load(sys.stdin)
    path = Path(request["model"])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.inference_mode():
        results = [
            perplexity(
                model,
                getattr(kvpress, name)(**arguments) if name else None,
                request["prompt"],
                request["follows"],
            )
            for name, arguments in request["methods"]
        ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
