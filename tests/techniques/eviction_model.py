"""A small model, and what tests of methods that drop keys look at."""

from collections.abc import Callable
from typing import Any

import numpy as np

from effinfer import LLM, SamplingParams
from effinfer.techniques import StreamingVLM, Technique
from effinfer.techniques.streaming_vlm import TAGS
from tests.techniques.watching import watching

CONTEXT = 512


def load(path: Any, *techniques: Technique, **options: Any) -> LLM:
    settings = {"threads": 1, "prefix_cache": False, "max_batch_tokens": 128, **options}
    return LLM(path, techniques=list(techniques), **settings)


def prompt_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, 250, count).tolist()
    return tokens


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


GROUP = 2  # query heads of a KV head, of which there are two in each of two layers


def keys_of(cache: Any, sequence: Any) -> np.ndarray:
    """Of the first layer: float32 [KV head, slot, dim] (the pages' order is in kv_layout.h)."""
    pages = [cache.k_page(0, page).view(np.float32) for page in cache.pages(sequence.id)]
    tiles = np.stack([page.reshape(2, 4, 64, 16) for page in pages], axis=1)
    return tiles.transpose(0, 1, 2, 4, 3).reshape(2, -1, 64)[:, : sequence.length]


def noting(plane: str, llms: list[LLM], seen: list[Any]) -> Callable[[Any], None]:
    """Notes the plane of a sequence and the first layer's keys."""

    def note(sequence: Any) -> None:
        keys = keys_of(llms[0].engine.kv_cache, sequence)
        seen.append((sequence.plane(plane), keys))

    return note


def watched(path: Any, method: Technique, prompt: list[int], count: int, **when: Any) -> list[Any]:
    """What a request's planes and keys are before and behind the method's hook."""
    llms: list[LLM] = []
    seen: list[Any] = []
    plane = TAGS if isinstance(method, StreamingVLM) else method.name
    note = noting(plane, llms, seen)
    before, after = (watching(note, name, **when) for name in ("before", "after"))
    llms.append(load(path, before, method, after, precision="f32", kv_dtype="f32"))
    assert llms[0].generate([prompt], greedy(count))[0].error == ""
    return seen


def best(scores: np.ndarray, pool: int, count: int, last: int) -> np.ndarray:
    """Of each row the `count` slots with the greatest maximum around them, the last ones first."""
    wide = np.pad(scores, ((0, 0), (pool // 2, pool // 2)), constant_values=-1.0)
    pooled = np.lib.stride_tricks.sliding_window_view(wide, pool, axis=1).max(axis=2)
    pooled[:, scores.shape[1] - last :] = np.inf
    order = np.argsort(-pooled, axis=1, kind="stable")
    return np.sort(order[:, :count], axis=1)
