"""Keys that stand for several: what attention makes of their counts, and the methods that merge."""

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import effinfer
from effinfer import LLM, SamplingParams, _core
from effinfer.techniques import Chelsea, Meta, SubGen, Technique, ZeroTuning, hook
from effinfer.techniques.clusters import clusters, matches
from effinfer.techniques.weights import with_weights
from effinfer.testing import make_model
from tests.reference.decoder import Decoder
from tests.techniques.watching import watching


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model("llama-tiny", tmp_path_factory.mktemp("models") / "m.gguf", context=512)


def prompt_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, 250, count).tolist()
    return tokens


def generate(path: Any, *techniques: Technique, prompt: list[int], count: int) -> Any:
    llm = LLM(
        path,
        techniques=list(techniques),
        threads=1,
        prefix_cache=False,
        precision="f32",
        kv_dtype="f32",
    )
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
    output = llm.generate([prompt], params)[0]
    assert output.error == ""
    llm.engine.kv_cache.check_integrity()
    return output


def logprobs(path: Any, *techniques: Technique, prompt: list[int], count: int) -> list[float]:
    entries = generate(path, *techniques, prompt=prompt, count=count).logprobs
    return [entry.logprob for entry in entries]


def changing(change: Any) -> Technique:
    """A technique with counts of its slots, which calls change(sequence) at a prompt's end."""

    @dataclass(frozen=True)
    class Change(Technique):
        META: ClassVar[Meta] = Meta(
            paper="a test",
            arxiv="",
            family="test.change",
            primitives=("weights",),
            effect="approximate",
            exclusive=("kv.resident", "attention.weights"),
            python_steps=True,
        )

        def facts(self) -> dict[str, str | int]:
            return {"weights": "counts"}

        def graph(self, graph: _core.Graph) -> _core.Graph:
            return with_weights(graph, "counts")

        @hook(when="prompt_end")
        def change(self, event: Any, sequence: Any) -> None:
            change(sequence)

    return Change()


HEADS = 4  # of two layers with two KV heads each


def copy_slots(sequence: Any) -> None:
    """Slots 50, 51 and 120 become copies of slot 20, and 70 of 71."""
    for head in range(HEADS):
        for to, source in ((50, 20), (51, 20), (120, 20), (70, 71)):
            sequence.merge(head, to, [source], [1.0])


def without(size: int, dropped: tuple[int, ...]) -> list[int]:
    return [slot for slot in range(size) if slot not in dropped]


def test_equal_keys_merge_without_loss(path):
    def merge(sequence: Any) -> None:
        copy_slots(sequence)
        before = [sequence.keys(1), sequence.values(1)]
        into = np.tile(np.arange(sequence.length), (HEADS, 1))
        into[:, [50, 51, 120]] = 20
        into[:, 70] = 71
        sequence.merge_slots(into, "counts")
        kept = without(150, (50, 51, 120, 70))
        assert sequence.length == len(kept)
        np.testing.assert_allclose(sequence.keys(1), before[0][kept], rtol=2**-22)
        np.testing.assert_allclose(sequence.values(1), before[1][kept], rtol=2**-22)
        counts = np.exp(sequence.plane("counts"))
        expected = np.ones(146)
        expected[kept.index(20)], expected[kept.index(71)] = 4, 2
        np.testing.assert_allclose(counts, np.tile(expected, (HEADS, 1)), rtol=1e-6)

    def drop(sequence: Any) -> None:
        copy_slots(sequence)
        sequence.retain([without(150, (50, 51, 120, 70))])

    rows = [
        logprobs(path, changing(change), prompt=prompt_of(150), count=30)
        for change in (copy_slots, merge, drop)
    ]
    # As many roundings as keys in sums of two layers; what was dropped is missed by far more.
    np.testing.assert_allclose(rows[1], rows[0], atol=2e-4)
    assert np.abs(np.subtract(rows[2], rows[0])).max() > 0.01


@pytest.mark.parametrize(
    ("into", "error"),
    [
        (np.zeros((HEADS, 20), int), None),
        (np.zeros(20, int), r"into: expected int32 \[heads, slots\]"),
        (np.zeros((3, 20), int), "into: expected 4 lists, got 3"),
        (np.zeros((HEADS, 19), int), r"into\[0\]: expected 20 slots, got 19"),
        (np.full((HEADS, 20), 20), "expected a slot that goes into itself, got 20"),
        (np.tile([1, *range(19)], (HEADS, 1)), "expected a slot that goes into itself, got 1"),
        (np.array([range(20), [0] * 20] * 2), "expected 20 slots that stay, as of the first head"),
    ],
)
def test_wrong_merges_end_the_request(path, into, error):
    technique = changing(lambda sequence: sequence.merge_slots(into, "counts"))
    llm = LLM(path, techniques=[technique], threads=1)
    output = llm.generate([prompt_of(20)], SamplingParams(temperature=0.0, max_tokens=4))[0]
    assert re.search(error, output.error) if error else output.error == ""


@pytest.mark.parametrize("verb", ["keys", "values"])
def test_heads_that_there_are_not_are_refused(path, verb):
    technique = changing(lambda sequence: getattr(sequence, verb)(HEADS))
    llm = LLM(path, techniques=[technique], threads=1)
    output = llm.generate([prompt_of(20)], SamplingParams(temperature=0.0, max_tokens=4))[0]
    assert "head: expected 0..3, got 4" in output.error


def test_matches_are_the_best_within_a_chunk():
    keys = np.random.default_rng(3).normal(size=(48, 16)).astype(np.float32)
    into = matches(keys, 12, 10)
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    found = []
    for slot in range(0, 48, 2):
        chunk = slot // 12 * 12
        others = np.arange(chunk + 1, chunk + 12, 2)
        cosines = units[others] @ units[slot]
        found.append((float(cosines.max()), slot, int(others[cosines.argmax()])))
    expected = np.arange(48)
    for _, slot, other in sorted(found, reverse=True)[:10]:
        expected[slot] = other
    np.testing.assert_array_equal(into, expected)


@pytest.mark.parametrize(
    "method",
    [
        Chelsea(budget=120, sinks=4, recent=30, stride=10, chunk=16, chunk_tokens=64),
        SubGen(budget=120, recent=30, stride=10, chunk_tokens=64),
    ],
    ids=["chelsea", "subgen"],
)
def test_slots_within_the_budget_count_for_all_tokens(path, method):
    seen: list[Any] = []

    def look(sequence: Any) -> None:
        counts = np.exp(sequence.plane(f"{method.name}.counts"))
        seen.append((sequence.next_position, counts))

    watch = watching(look, when="every", tokens=1)
    generate(path, method, watch, prompt=prompt_of(300), count=60)
    assert len(seen) >= 58
    for position, counts in seen:
        assert 110 < counts.shape[1] <= 120
        np.testing.assert_allclose(counts.sum(axis=1), position, rtol=1e-5)
        np.testing.assert_array_equal(counts[:, -20:], 1)
    if isinstance(method, Chelsea):
        assert all((counts[:, :4] == 1).all() for _, counts in seen)


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, counts: np.ndarray) -> Any:
    """Its sum of exponentials, and its result, in float64."""
    terms = counts * np.exp(keys.astype(np.float64) @ query)
    return terms.sum(), terms @ values / terms.sum()


def test_clusters_estimate_attention_within_their_width():
    """40 clusters of 25 keys, no two of one further apart than 2 r: sums of exponentials are off by
    a factor of e^(2 r |q|) at most, and results are those of all keys on average."""
    rng = np.random.default_rng(4)
    centres, offsets = 3 * rng.normal(size=(40, 1, 16)), rng.normal(size=(40, 25, 16))
    radius = 0.05
    offsets *= radius / np.linalg.norm(offsets, axis=2, keepdims=True)
    keys = (centres + offsets).reshape(-1, 16)[rng.permutation(1000)].astype(np.float32)
    values, query = rng.normal(size=(1000, 8)), rng.normal(size=16)
    total, result = attention(query, keys, values, np.ones(1000))
    bound = math.exp(2 * radius * float(np.linalg.norm(query)))
    results = []
    for seed in range(300):
        draws = np.random.default_rng(seed)
        drawn, counts = clusters(keys, np.ones(1000, np.float32), 960, draws)
        assert (np.diff(drawn) > 0).all()
        np.testing.assert_array_equal(counts, 25)
        estimate, each = attention(query, keys[drawn], values[drawn], counts)
        assert 1 / bound <= estimate / total <= bound
        results.append(each)
    error = np.mean(results, axis=0) - result
    spread = np.std(results, axis=0) / 300**0.5
    assert (np.abs(error) < 4 * spread + 2 * (bound - 1)).all()


def test_clusters_draw_by_counts():
    keys = np.zeros((3, 4), np.float32)
    keys[2] = 9
    counts = np.array([1, 3, 2], np.float32)
    drawn = [clusters(keys, counts, 1, np.random.default_rng(seed)) for seed in range(400)]
    first = [int(slots[0]) for slots, _ in drawn]
    assert all(slots[1] == 2 and list(sums) == [4, 2] for slots, sums in drawn)
    assert abs(np.mean(first) - 0.75) < 4 * (0.75 * 0.25 / 400) ** 0.5


@pytest.mark.parametrize("heads", [(), ((0, 1), (1, 3))], ids=["all", "some"])
def test_zero_tuning_multiplies_attention_to_the_first_token(path, heads, monkeypatch):
    """Beside a reference whose logits of the first key are more by the factor's logarithm."""
    method = ZeroTuning(percent=300, heads=heads)
    prompt = prompt_of(60)
    reference = Decoder.from_gguf(path)
    plain = reference.logits(prompt)
    einsum, layers = torch.einsum, iter(range(2))

    def tuned(equation: str, *tensors: torch.Tensor) -> torch.Tensor:
        result = einsum(equation, *tensors)
        if equation != "qhd,khd->hqk":
            return result
        layer = next(layers)
        scale = reference.config.head_dim**-0.5
        for head in range(result.shape[0]):
            if not heads or (layer, head) in heads:
                result[head, :, 0] += math.log(3) / scale
        return result

    monkeypatch.setattr(torch, "einsum", tuned)
    expected = reference.logits(prompt)
    rows = [torch.log_softmax(logits[-1].double(), -1).max().item() for logits in (plain, expected)]
    assert abs(rows[0] - rows[1]) > 1e-3
    assert abs(logprobs(path, method, prompt=prompt, count=1)[0] - rows[1]) < 2e-4


def test_zero_tuning_refuses_heads_that_there_are_not(path):
    with pytest.raises(effinfer.InvalidArgumentError, match=r"heads: expected .* got \(2, 0\)"):
        LLM(path, techniques=[ZeroTuning(heads=((0, 0), (2, 0)))])


def test_zero_tuning_searches_the_best_factor():
    score = {100: 0.5, 50: 0.25, 80: 0.75, 125: 0.75, 200: 0.0}
    best = ZeroTuning(heads=((1, 2),)).search(lambda each: score[each.percent])
    assert best == ZeroTuning(percent=80, heads=((1, 2),))
    assert ZeroTuning().search(lambda each: 0.0).percent == 100


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Chelsea(budget=259), r"\[Chelsea\] budget: expected at least 260 .* got 259"),
        (lambda: SubGen(budget=192), r"\[SubGen\] budget: expected at least 193 .* got 192"),
    ],
)
def test_budgets_hold_what_stays_anyway(make, error):
    with pytest.raises(effinfer.InvalidArgumentError, match=error):
        make()
