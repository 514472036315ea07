"""Forked and rolled-back sequences of a real model give the bits of sequences that never were."""

from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer.checkpoints.model_files import open_model
from effinfer.hub import resolve
from tests.models.subject import TEXT

MODES: dict[str, dict[str, Any]] = {
    "f32": {"precision": "f32"},
    "deterministic": {"deterministic": True},
    "fast": {},
}


class Model:
    """SmolLM2 with its sequences fed by hand."""

    def __init__(self, mode: str) -> None:
        files = open_model(resolve("smollm2-135m"))
        options = _core.CompileOptions(max_seq_len=256, **MODES[mode])
        self.executable = _core.compile(files.graph, files.weights, _core.ThreadPool(0), options)
        self.cache = self.executable.make_cache(16)
        self.text = files.tokenizer().encode(TEXT.read_text())

    def start(self, prompt: list[int]) -> int:
        sequence, _ = self.cache.create(prompt)
        self.feed([sequence], [prompt], "prefill")
        return int(sequence)

    def feed(self, sequences: list[int], tokens: list[list[int]], phase: str) -> np.ndarray:
        """Appends tokens to each sequence in one step; the logits of each one's last token."""
        positions: list[int] = []
        pages: list[int] = []
        starts, page_starts, lengths = [0], [0], []
        for sequence, new in zip(sequences, tokens, strict=True):
            first = self.cache.length(sequence)
            self.cache.append(sequence, new)
            positions += range(first, first + len(new))
            pages += self.cache.pages(sequence)
            starts.append(starts[-1] + len(new))
            page_starts.append(len(pages))
            lengths.append(first + len(new))
        logits = self.executable.run(
            token_ids=sum(tokens, []),
            positions=positions,
            qo_indptr=starts,
            kv_indptr=page_starts,
            kv_indices=pages,
            kv_len=lengths,
            logit_rows=[end - 1 for end in starts[1:]],
            cache=self.cache,
            phase=phase,
        )
        for sequence, new in zip(sequences, tokens, strict=True):
            self.cache.commit(sequence, len(new))
        self.cache.check_integrity()
        return logits

    def decode(self, sequence: int, tokens: list[int]) -> np.ndarray:
        return np.concatenate([self.feed([sequence], [[token]], "decode") for token in tokens])


@pytest.fixture(scope="module", params=MODES)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.fixture(autouse=True)
def empty_cache(model: Model) -> None:
    model.cache = model.executable.make_cache(16)


# Beside and on the border of a page of 64: copy on write of a part, and of nothing.
@pytest.mark.parametrize("length", [50, 64, 70])
def test_branches_of_a_fork(model: Model, length: int) -> None:
    prompt, left, right = model.text[:length], model.text[200:206], model.text[300:306]
    trunk = model.start(prompt)
    branch = model.cache.fork(trunk)
    together = [
        model.feed([trunk, branch], [[a], [b]], "decode") for a, b in zip(left, right, strict=True)
    ]
    apart = [model.decode(model.start(prompt), tokens) for tokens in (left, right)]
    np.testing.assert_array_equal(np.stack(together, 1), np.stack(apart))


@pytest.mark.parametrize("length", [50, 64, 70])
def test_rollback(model: Model, length: int) -> None:
    prompt, wrong, right = model.text[:length], model.text[200:215], model.text[300:306]
    expected = model.decode(model.start(prompt), right)
    sequence = model.start(prompt)
    model.feed([sequence], [wrong], "decode")
    model.cache.rollback(sequence, len(wrong))
    np.testing.assert_array_equal(model.decode(sequence, right), expected)


def test_rollback_of_a_branch_leaves_the_trunk(model: Model) -> None:
    prompt, right = model.text[:70], model.text[300:306]
    expected = model.decode(model.start(prompt), right)
    trunk = model.start(prompt)
    branch = model.cache.fork(trunk)
    model.cache.rollback(branch, 30)
    model.feed([branch], [model.text[100:140]], "decode")
    np.testing.assert_array_equal(model.decode(trunk, right), expected)
