"""The code of docs/write_a_technique.md, as a reader would run it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from tests.reference import tiny

PAGE = Path(__file__).parents[2] / "docs" / "write_a_technique.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = {**tiny.FAMILIES["llama"], "max_position_embeddings": 1024}
    return tiny.write_gguf(config, tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def page(model) -> dict[str, Any]:
    """What its blocks define, run in order."""
    prompt = np.random.default_rng(4).integers(0, 200, 600).tolist()
    scope: dict[str, Any] = {"model": model, "prompt": prompt}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    return scope


def greedy(**keywords: Any) -> effinfer.SamplingParams:
    return effinfer.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **keywords)


def test_the_first_technique_chooses_keys(page, model):
    method = page["FirstAndNearest"]
    prompt = page["prompt"]
    plain = effinfer.LLM(model).generate([prompt], greedy())[0].token_ids
    llm = effinfer.LLM(model, techniques=[method(nearest=64, min_tokens=0)])
    assert llm.generate([prompt], greedy())[0].token_ids != plain
    assert llm.generate([prompt], greedy(techniques=()))[0].token_ids == plain
    limit = method(**method.META.dense_limit, min_tokens=0)
    dense = effinfer.LLM(model, techniques=[limit])
    assert dense.generate([prompt], greedy())[0].token_ids == plain
    with pytest.raises(effinfer.InvalidArgumentError, match=r"\[FirstAndNearest\] first: "):
        method(first=0)
    with pytest.raises(effinfer.ConflictError, match=r"prefill\.visits"):
        effinfer.LLM(model, techniques=[method(), "xattention"])


def test_the_hook_is_called_when_its_trigger_fires(page, model):
    seen: list[tuple[int, int]] = []
    technique = page["Lengths"](every=6, report=lambda *facts: seen.append(facts))
    llm = effinfer.LLM(model, techniques=[technique])
    outputs = llm.generate([[1, 2, 3], [4] * 70], greedy())
    assert [len(output.token_ids) for output in outputs] == [20, 20]
    first, second = sorted({request for request, _ in seen})
    assert [n for request, n in seen if request == first] == [9, 15, 21]
    assert [n for request, n in seen if request == second] == [76, 82, 88]


def test_the_request_is_changed(page, model):
    llm = effinfer.LLM(model, techniques=[page["Careful"]()])
    params = effinfer.SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    short = [llm.generate([[1, 2]], params)[0].token_ids for _ in range(4)]
    assert len({tuple(ids) for ids in short}) > 1
    long = [5] * 1001
    greedy_ids = llm.generate([long], effinfer.SamplingParams(temperature=0.0, max_tokens=8))
    assert all(
        llm.generate([long], params)[0].token_ids[: len(greedy_ids[0].token_ids)]
        == greedy_ids[0].token_ids
        for _ in range(3)
    )
