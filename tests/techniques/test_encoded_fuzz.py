"""Random requests that share an engine with encoded pages: each has the text that it has alone."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from effinfer import LLM, SamplingParams
from effinfer.techniques import CSKV, GEAR, KIVI, CommVQ, SuffixDecoding, hook
from effinfer.techniques.technique import Meta, Technique
from tests.reference import tiny
from tests.techniques.contract_cases import random_basis, random_codebooks
from tests.techniques.contract_model import long_model


@dataclass(frozen=True)
class KeepsSome(Technique):
    """Keeps random keys of a prompt, which its length decides."""

    META: ClassVar[Meta] = Meta(
        paper="a test",
        arxiv="",
        family="test.some",
        primitives=("hooks",),
        effect="approximate",
        python_steps=True,
        name="keeps_some",
    )

    @hook(when="prompt_end")
    def choose(self, event: Any, sequence: Any) -> None:
        random = np.random.default_rng(sequence.length)
        count = 1 + sequence.length // 2
        heads = [random.choice(sequence.length, count, replace=False) for _ in range(3 * 2)]
        sequence.retain([sorted(map(int, kept)) for kept in heads])


def random_encoding(seed: int, random: np.random.Generator) -> Technique:
    bits, residual = 2 if seed % 2 else 4, int(random.integers(0, 100))
    if seed < 2:
        return KIVI(bits=bits, residual=residual)
    if seed == 3:
        return CSKV(features=16, bits=bits, residual=residual, basis=random_basis(16, 32))
    if seed == 4:
        return CommVQ(residual=residual, codebooks=random_codebooks())
    rank, outliers = (int(random.integers(most)) for most in (4, 30))
    return GEAR(bits=bits, residual=residual, rank=rank, outliers=outliers)


def random_requests(
    choices: tuple[tuple[str, ...], ...], random: np.random.Generator
) -> list[tuple[list[int], list[SamplingParams]]]:
    """Prompts that begin alike and repeat themselves, with one to three answers each; of the
    choices of techniques one each."""
    common = random.integers(0, 200, 150).tolist()
    requests = []
    for _ in range(7):
        own = random.integers(0, 200, random.integers(1, 60)).tolist()
        prompt = common[: random.integers(0, 150)] + own * int(random.integers(1, 5))
        params = SamplingParams(
            temperature=0.8 * random.integers(0, 2),
            seed=int(random.integers(1 << 30)),
            max_tokens=int(random.integers(1, 160)),
            ignore_eos=True,
            techniques=choices[random.integers(len(choices))],
        )
        count = int(random.integers(1, 4))
        answers = [replace(params, seed=params.seed + i) for i in range(count)]
        requests.append((prompt, answers))
    return requests


class Shared:
    """Requests that share an engine, as they come: some at once, some while others run, some that
    go on with the text of one that ended."""

    def __init__(self, llm: LLM, random: np.random.Generator, at_once: bool) -> None:
        self.engine, self.random, self.at_once = llm.engine, random, at_once
        self.texts: dict[int, list[int]] = {}
        self.asked: dict[int, tuple[list[int], SamplingParams, int]] = {}
        self.ended: set[int] = set()  # early

    def add(self, prompt: list[int], answers: list[SamplingParams]) -> None:
        ids = self.engine.add_answers(prompt, [params.to_core() for params in answers])
        for each, params in zip(ids, answers, strict=True):
            self.texts[each], self.asked[each] = [], (prompt, params, len(answers))

    def go_on_from(self, request: int) -> None:
        prompt, params, _ = self.asked[request]
        before = [*prompt, *self.texts[request]]
        if len(before) < 400:  # the pages of the engine hold it and its answer
            self.add([*before, *self.random.integers(0, 200, 20).tolist()], [params])

    def run(self, requests: list[tuple[list[int], list[SamplingParams]]]) -> None:
        waiting, to_cancel = list(requests), int(self.random.integers(len(requests)))
        while waiting or self.engine.has_work():
            while waiting and (
                self.at_once or not self.engine.has_work() or self.random.random() < 0.1
            ):
                self.add(*waiting.pop(0))
            for output in self.engine.step():
                if output.error:  # no page for a copy of one that its answers share
                    assert "OutOfMemoryError: [kv_cache] retain" in output.error
                    self.ended.add(output.request)
                self.texts[output.request] += output.token_ids
                if output.finish_reason == "length" and self.random.random() < 0.3:
                    self.go_on_from(output.request)
            self.engine.kv_cache.check_integrity()
            cancelled = list(self.texts)[min(to_cancel, len(self.texts) - 1)]
            if not self.ended and len(self.texts[cancelled]) > 5:
                self.engine.cancel(cancelled)
                self.ended.add(cancelled)

    def check(self, alone: LLM) -> None:
        """Beside what each request has in an engine of its own, as far as it came."""
        assert len(self.ended) < len(self.texts) / 2
        cache = self.engine.kv_cache
        assert cache.available_pages == cache.num_pages
        for each, (prompt, params, answers) in self.asked.items():
            expected = alone.generate([prompt], params)[0].token_ids
            if each in self.ended:
                expected = expected[: len(self.texts[each])]
            facts = (params.techniques, answers, self.engine.metrics(each))
            assert self.texts[each] == expected, facts


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_random_requests_have_the_texts_that_they_have_alone(tmp_path_factory, seed, at_once):
    random = np.random.default_rng(seed + (0 if at_once else 100))
    path = long_model(tmp_path_factory)
    encoding = random_encoding(seed, random)
    options: dict[str, Any] = {
        "techniques": [encoding, KeepsSome()],
        "threads": 1,
        "deterministic": True,
    }
    llm = LLM(path, num_pages=12, speculation=SuffixDecoding(), **options)
    shared = Shared(llm, random, at_once)
    choices = ((), (encoding.name,), (encoding.name,), (encoding.name, "keeps_some"))
    shared.run(random_requests(choices, random))
    assert any(llm.engine.metrics(each)["preemptions"] for each in shared.texts)
    shared.check(LLM(path, prefix_cache=False, **options))


@pytest.mark.parametrize("seed", [1, 2])
def test_so_they_have_beside_layers_with_a_window(tmp_path, seed):
    random = np.random.default_rng(200 + seed)
    config = {**tiny.FAMILIES["gemma3"], "max_position_embeddings": 1024, "sliding_window": 40}
    path = tiny.write_gguf(config, tmp_path / "gemma3.gguf")
    encoding = random_encoding(seed, random)
    options: dict[str, Any] = {"techniques": [encoding], "threads": 1, "deterministic": True}
    llm = LLM(path, num_pages=12, speculation=SuffixDecoding(), **options)
    shared = Shared(llm, random, at_once=False)
    shared.run(random_requests(((), (encoding.name,)), random))
    shared.check(LLM(path, prefix_cache=False, **options))
