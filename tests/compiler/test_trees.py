"""Trees of drafts through executables: the bits of plain decoding, and what is kept of them."""

from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer.techniques import XAttention
from tests.compiler.tiny_models import (
    HEAD_DIM,
    LAYERS,
    PAGE,
    VOCAB,
    TinyModel,
    make_gemma,
    make_llama,
)
from tests.draft_trees import SIZES, keys_and_values, paths_of, random_parents, stays

TOKENS = [int(t) for t in np.random.default_rng(4).integers(0, VOCAB, 200)]
QUANTISED = {"q": "q4_0", "k": "q8_0", "v": "q5_1", "gate": "q4_1", "down": "q8_0", "embed": "q8_0"}
MODELS = {"llama": make_llama(**QUANTISED), "gemma": make_gemma(**QUANTISED)}


class Runner:
    """An executable and its cache: steps of sequences that take what they are given."""

    def __init__(self, model: TinyModel, **options: Any) -> None:
        self.executable = model.compile(**{"max_tokens": 192, "max_rows": 192, **options})
        self.cache = self.executable.make_cache(40)

    def sequence(self, tokens: list[int]) -> int:
        """A new sequence, its tokens committed."""
        sequence, _ = self.cache.create([])
        if tokens:
            self.step({sequence: (tokens, None)})
            self.cache.commit(sequence, len(tokens))
        return sequence

    def step(
        self,
        rows: dict[int, tuple[list[int], list[list[int]] | None]],
        tree_start: dict[int, int] | None = None,
        phase: str = "decode",
    ) -> list[np.ndarray]:
        """Appends tokens, of a chain or of a tree with these paths (the last of them); the logits
        of all rows, by sequence."""
        ids, positions, words, indices, starts = [], [], [], [], []
        qo_indptr, kv_indptr, kv_len = [0], [0], []
        for sequence, (tokens, paths) in rows.items():
            begin = self.cache.length(sequence)
            start = (tree_start or {}).get(sequence, begin)
            self.cache.append(sequence, tokens)
            ids += tokens
            if paths is None:
                positions += range(begin, begin + len(tokens))
                words += [0] * len(tokens)
            else:
                positions += [start + len(path) - 1 for path in paths[-len(tokens) :]]
                words += [sum(1 << i for i in path) for path in paths[-len(tokens) :]]
            starts.append(start)
            indices += self.cache.pages(sequence)
            qo_indptr.append(len(ids))
            kv_indptr.append(len(indices))
            kv_len.append(begin + len(tokens))
        logits = self.executable.run(
            token_ids=ids,
            positions=positions,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=indices,
            kv_len=kv_len,
            logit_rows=list(range(len(ids))),
            cache=self.cache,
            phase=phase,
            ancestors=words if any(words) else None,
            tree_start=starts if tree_start else None,
        )
        self.cache.check_integrity()
        return np.split(logits, qo_indptr[1:-1])

    def plain(self, context: int, drafts: list[int], parents: list[int]) -> np.ndarray:
        """The logits behind each draft: one token a step, after its parent."""
        root = self.sequence(TOKENS[:context])
        sequences, logits = [], []
        for token, parent in zip(drafts, parents, strict=True):
            sequence = self.cache.fork(sequences[parent] if parent >= 0 else root)
            logits.append(self.step({sequence: ([token], None)})[0][0])
            self.cache.commit(sequence, 1)
            sequences.append(sequence)
        for sequence in [root, *sequences]:
            self.cache.release(sequence, False)
        return np.array(logits)

    def keys_and_values(self, sequence: int, dtype: str) -> np.ndarray:
        """Their bytes, [layers, K and V, kv_heads, tokens, head bytes] (kv_layout.h)."""
        return keys_and_values(self.cache, sequence, LAYERS, HEAD_DIM, dtype)


def exact_rows(context: int, parents: list[int]) -> list[bool]:
    return [stays(context, path) for path in paths_of(parents)]


@pytest.mark.parametrize("precision", ["fast", "f32"])
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_tree_have_the_bits_of_plain_decoding(isa, name, dtype, precision):
    rng = np.random.default_rng(len(isa) + len(dtype))
    runner = Runner(MODELS[name], precision=precision, kv_dtype=dtype)
    for context in (0, 9, 53, 64, 120):
        parents = random_parents(rng, int(rng.integers(2, 20)))
        drafts = rng.integers(0, 5, len(parents)).tolist()  # siblings may be the same token
        expected = runner.plain(context, drafts, parents)
        sequence = runner.sequence(TOKENS[:context])
        together = runner.step({sequence: (drafts, paths_of(parents))})[0]
        exact = exact_rows(context, parents)
        np.testing.assert_array_equal(together[exact], expected[exact])
        error = np.linalg.norm(together - expected) / np.linalg.norm(expected)
        assert error < (0.05 if precision == "fast" or dtype != "f32" else 1e-4)
        runner.cache.release(sequence, False)
        assert runner.cache.free_pages == 40


@pytest.mark.parametrize("dtype", ["f32", "i8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_tree_of_64_nodes_grows_level_by_level(isa, name, dtype):
    rng = np.random.default_rng(1)
    runner = Runner(MODELS[name], kv_dtype=dtype)
    for context in (0, 64, 40):
        nodes = [-1]
        while len(nodes) < 64:  # levels: parents are of any earlier one
            nodes += sorted(rng.integers(-1, len(nodes), min(9, 64 - len(nodes))).tolist())
        drafts = rng.integers(0, VOCAB, 64).tolist()
        paths = paths_of(nodes)
        whole = runner.sequence(TOKENS[:context])
        expected = runner.step({whole: (drafts, paths)})[0]
        grown = runner.sequence(TOKENS[:context])
        parts = []
        for begin in [0, *range(1, 64, 9)]:
            end = min(begin + 9, 64) if begin > 0 else 1
            parts += runner.step(
                {grown: (drafts[begin:end], paths[:end])}, tree_start={grown: context}
            )
        np.testing.assert_array_equal(np.concatenate(parts), expected)
        if context % PAGE == 0:
            plain = runner.plain(context, drafts[:20], nodes[:20])
            np.testing.assert_array_equal(expected[:20], plain)
        for sequence in (whole, grown):
            runner.cache.release(sequence, False)


@pytest.mark.parametrize("options", [{}, {"precision": "f32"}, {"deterministic": True}])
@pytest.mark.parametrize("name", MODELS)
def test_chains_beside_trees(isa, name, options):
    runner = Runner(MODELS[name], **options)
    parents = random_parents(np.random.default_rng(2), 30)
    contexts, lengths = [70, 10, 5], [100, 1, 30]
    rows = [TOKENS[:100], TOKENS[7:8], TOKENS[20:50]]
    phases = ["decode"] if not options else ["decode", "prefill"]
    for phase in phases:
        alone, together, step = [], [], {}
        for context, tokens, count in zip(contexts, rows, lengths, strict=True):
            paths = paths_of(parents) if count == 30 else None
            sequence = runner.sequence(TOKENS[:context])
            alone += runner.step({sequence: (tokens, paths)}, phase=phase)
            step[runner.sequence(TOKENS[:context])] = (tokens, paths)
        for together in runner.step(step, phase=phase):
            np.testing.assert_array_equal(together, alone.pop(0))


def test_sparse_prefill_beside_a_tree():
    model = make_llama(**QUANTISED)
    method = XAttention(min_tokens=0, threshold=0.3, stride=4)
    sparse = TinyModel(method.graph(model.graph), model.source, model.exact)
    prompt, drafts = TOKENS[:150], TOKENS[150:155]
    paths = paths_of([-1, 0, 0, 1, 2])
    logits = []
    for of in (model, sparse):
        runner = Runner(of, deterministic=True)
        alone = runner.step({runner.sequence([]): (prompt, None)}, phase="prefill")[0]
        tree, chain = runner.sequence(TOKENS[:9]), runner.sequence([])
        step = {tree: (drafts, paths), chain: (prompt, None)}
        logits.append(runner.step(step, phase="prefill"))
        np.testing.assert_array_equal(logits[-1][1], alone)
    np.testing.assert_array_equal(logits[0][0], logits[1][0])
    assert (logits[0][1] != logits[1][1]).any()


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_a_kept_path_is_what_plain_decoding_leaves(name, dtype):
    rng = np.random.default_rng(6)
    runner = Runner(MODELS[name], kv_dtype=dtype)
    for context in (1, 40, 50, 60, 64):
        parents = random_parents(rng, int(rng.integers(2, 25)))
        drafts = rng.integers(0, VOCAB, len(parents)).tolist()
        paths = [path for path in paths_of(parents) if stays(context, path)]
        path = paths[int(rng.integers(len(paths)))]
        tree, plain = runner.sequence(TOKENS[:context]), runner.sequence(TOKENS[:context])
        runner.step({tree: (drafts, paths_of(parents))})
        runner.cache.keep(tree, path)
        runner.cache.check_integrity()
        for i in path:
            runner.step({plain: ([drafts[i]], None)})
        runner.cache.commit(plain, len(path))
        assert runner.cache.tokens(tree) == runner.cache.tokens(plain)
        assert runner.cache.committed(tree) == runner.cache.committed(plain)
        kept, expected = (runner.keys_and_values(s, dtype) for s in (tree, plain))
        np.testing.assert_array_equal(kept, expected)
        for token in TOKENS[100:105]:
            got, want = (runner.step({s: ([token], None)})[0] for s in (tree, plain))
            np.testing.assert_array_equal(got, want)
        for sequence in (tree, plain):
            runner.cache.release(sequence, False)


BATCH = {
    "token_ids": [1, 2, 3],
    "positions": [5, 6, 0],
    "qo_indptr": [0, 2, 3],
    "kv_indptr": [0, 2, 3],
    "kv_indices": [0, 1, 3],
    "kv_len": [70, 1],
    "logit_rows": [1, 2],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ancestors": [1]}, "ancestors: expected none or 3 entries, got 1"),
        ({"ancestors": [1, 1, 1]}, r"ancestors\[1\]: expected the row's own bit"),
        ({"ancestors": [3, 3, 1]}, r"ancestors\[0\]: expected the row's own bit"),
        ({"ancestors": [1, 0, 0]}, r"ancestors\[1\]: expected the row's own bit"),
        ({"ancestors": [0, 2, 0]}, r"ancestors\[0\]: expected the row's own bit"),
        ({"ancestors": [1, 6, 0]}, r"ancestors\[1\]: expected the row's own bit"),
        (
            {"ancestors": [0, 0, 3], "tree_start": [68, 0]},
            r"ancestors\[2\]: expected the row's own bit",
        ),
        ({"tree_start": [68]}, "tree_start: expected none or 2 entries, got 1"),
        ({"tree_start": [69, 0]}, r"tree_start\[0\]: expected 0..68 .*got 69"),
        ({"tree_start": [-1, 0]}, r"tree_start\[0\]: expected 0..68 .*got -1"),
        ({"tree_start": [5, 0]}, "at most 64 tokens in the tree of sequence 0, got 65"),
        ({"tree_start": [66, 0]}, r"ancestors\[0\]: expected the row's own bit"),
        ({"tree_start": [66, 0], "ancestors": [7, 13, 0]}, r"ancestors\[1\]: expected the row's"),
        ({"tree_start": [66, 0], "ancestors": [4, 28, 0]}, r"ancestors\[1\]: expected the row's"),
        ({"tree_start": [68, 1], "ancestors": [1, 2, 1]}, r"tree_start\[1\]: expected 0..0"),
    ],
)
def test_inconsistent_trees_are_refused(change, message):
    executable = MODELS["llama"].compile(precision="f32")
    cache = executable.make_cache(4)
    valid = {"ancestors": [1, 3, 0], "tree_start": [68, 99]}
    executable.run(**BATCH, **valid, cache=cache)
    executable.run(**BATCH, ancestors=[4 | 1, 8 | 4 | 1, 0], tree_start=[66, 0], cache=cache)
    executable.run(**BATCH, ancestors=[0, 0, 0], tree_start=[-1, 99], cache=cache)
    with pytest.raises(_core.InvalidArgumentError, match=message):
        executable.run(**{**BATCH, **valid, **change}, cache=cache)
