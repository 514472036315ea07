"""The model and the requests of the contract's tests."""

from pathlib import Path
from typing import Any

import numpy as np

from effinfer import LLM, SamplingParams
from tests.reference import tiny

CHUNK = 128  # tokens of a step, and where chunks end

Request = tuple[list[int], SamplingParams]


def long_model(tmp_path_factory: Any) -> Path:
    """Three layers, a context of 1,024 tokens."""
    config = {**tiny.FAMILIES["llama"], "max_position_embeddings": 1024}
    path: Path = tiny.write_gguf(config, tmp_path_factory.mktemp("models") / "tiny.gguf")
    return path


def asks(count: int = 8) -> list[Request]:
    """Ragged prompts, two of which begin alike, every second sampled."""
    rng = np.random.default_rng(7)
    sizes = [330, 70, 257, 128, 300, 20, 400, 190][:count]
    prompts = [rng.integers(0, 200, size).tolist() for size in sizes]
    if count > 4:
        prompts[4] = [*prompts[0][:200], *prompts[4][:100]]
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=4 + 3 * i, ignore_eos=True)
        for i in range(count)
    ]
    return list(zip(prompts, params, strict=True))


def texts(llm: LLM, requests: list[Request]) -> list[list[int]]:
    """Of requests that run together; nothing but cached prefixes is left of them."""
    prompts, params = zip(*requests, strict=True)
    outputs = llm.generate(list(prompts), list(params))
    assert [output.error for output in outputs] == [""] * len(outputs)
    cache = llm.engine.kv_cache
    cache.check_integrity()
    assert cache.available_pages == cache.num_pages
    return [output.token_ids for output in outputs]
