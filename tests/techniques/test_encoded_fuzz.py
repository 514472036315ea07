"""Random requests that share an engine with encoded pages: each has the text that it has alone."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from effinfer import LLM, SamplingParams
from effinfer.techniques import KIVI, SuffixDecoding, hook
from effinfer.techniques.technique import Meta, Technique
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


CHOICES: tuple[tuple[str, ...], ...] = ((), ("kivi",), ("kivi",), ("kivi", "keeps_some"))


def random_requests(random: np.random.Generator) -> list[tuple[list[int], list[SamplingParams]]]:
    """Prompts that begin alike and repeat themselves, with one to three answers each."""
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
            techniques=CHOICES[random.integers(len(CHOICES))],
        )
        count = int(random.integers(1, 4))
        answers = [replace(params, seed=params.seed + i) for i in range(count)]
        requests.append((prompt, answers))
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_have_the_texts_that_they_have_alone(tmp_path_factory, seed):
    random = np.random.default_rng(seed)
    path = long_model(tmp_path_factory)
    kivi = KIVI(bits=2 if seed % 2 else 4, residual=int(random.integers(0, 100)))
    requests = random_requests(random)
    options: dict[str, Any] = {
        "techniques": [kivi, KeepsSome()],
        "threads": 1,
        "deterministic": True,
    }
    shared = LLM(path, num_pages=12, speculation=SuffixDecoding(), **options)
    engine = shared.engine
    ids = [
        engine.add_answers(prompt, [params.to_core() for params in answers])
        for prompt, answers in requests
    ]
    cancelled = int(random.choice(np.concatenate(ids)))
    ended = {cancelled}  # early
    texts: dict[int, list[int]] = {each: [] for answers in ids for each in answers}
    while engine.has_work():
        for output in engine.step():
            if output.error:  # no page for a copy of one that its answers share
                assert "OutOfMemoryError: [kv_cache] retain" in output.error
                ended.add(output.request)
            texts[output.request] += output.token_ids
        engine.kv_cache.check_integrity()
        if len(texts[cancelled]) > 5:
            engine.cancel(cancelled)
    assert len(ended) < len(texts) / 2
    assert engine.kv_cache.available_pages == engine.kv_cache.num_pages
    assert any(engine.metrics(each)["preemptions"] for each in texts)
    alone = LLM(path, prefix_cache=False, **options)
    for (prompt, answers), numbers in zip(requests, ids, strict=True):
        for params, each in zip(answers, numbers, strict=True):
            expected = alone.generate([prompt], params)[0].token_ids
            if each in ended:
                expected = expected[: len(texts[each])]
            assert texts[each] == expected, (params.techniques, len(answers), engine.metrics(each))
