"""Heads that draft from the target's hidden states: proposers see the right rows, drafts are what
numpy computes of them, and no text, log-probability or byte of the cache changes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Draft, Proposer, Speculation
from effinfer.techniques import Eagle, Gumiho, Hydra, Medusa
from effinfer.techniques.vocab_trim import find_head
from tests.head_files import Reference, random_weights, write_heads
from tests.reference import tiny
from tests.runtime.test_draft_model import check, metrics, warned
from tests.runtime.test_drafts import Guesser, make_engine, ragged, run, same

EMULATED = os.environ.get("EFFINFER_EMULATED", "")
SIZE, VOCAB = 64, tiny.VOCAB_SIZE
TOKENS = list(range(0, VOCAB, 3))
KINDS = {"medusa": Medusa, "hydra": Hydra, "gumiho": Gumiho, "eagle": Eagle}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Path]:
    return {
        kind: write_heads(
            folder / f"{kind}.gguf", kind, random_weights(kind, SIZE), SIZE, VOCAB, TOKENS
        )
        for kind in KINDS
    }


def hidden_of(model: ModelFiles) -> str:
    return find_head(model.graph)["inputs"][0]


class Recorder(Proposer):
    """Keeps what steps tell, and drafts what `guesser` does."""

    name = "recorder"
    top_k = 3

    def __init__(self, model: ModelFiles, guesser: Guesser | None = None) -> None:
        self.outputs = [hidden_of(model)]
        self.guesser = guesser
        self.facts: list[dict[str, Any]] = []

    def propose(self, views: list[dict[str, Any]]) -> list[Draft | None]:
        return self.guesser.propose(views) if self.guesser else [None] * len(views)

    def observe(self, facts: list[dict[str, Any]]) -> None:
        self.facts += facts


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_a_proposer_asked_for_are_those_of_its_logits(models, name, options):
    model = models[name]
    asks = ragged(6, VOCAB, most=40)
    options = {"precision": "f32", "prefix_cache": False, **options}
    plain = run(make_engine(model, **options), asks)
    recorder = Recorder(model, Guesser(asks, plain, VOCAB, seed=1))
    speculation = Speculation([recorder], controller=20).build()
    same(run(make_engine(model, speculation=speculation, **options), asks), plain)
    head = model.weights.dequantize(
        model.graph.values[find_head(model.graph)["inputs"][1]]["weight_name"]
    )
    compared = 0
    for fact in recorder.facts:
        rows = fact["outputs"][hidden_of(model)]
        assert rows.shape == (1 + len(fact["verified"] or ()), SIZE)
        if len(fact["top_tokens"]) == 0:
            continue
        logits = rows @ head.T
        highest = np.take_along_axis(logits, fact["top_tokens"], 1)
        np.testing.assert_allclose(highest, fact["top_values"], rtol=1e-3, atol=1e-3)
        compared += len(rows)
    assert compared > 300


def test_values_that_are_no_rows_of_the_graph_are_refused(models):
    model = models["llama"]
    for name in ("nothing", model.graph.outputs[0], "token_ids"):
        recorder = Recorder(model)
        recorder.outputs = [name]
        with pytest.raises(effinfer.InvalidArgumentError, match=r"expected a value f32\[R, size\]"):
            make_engine(model, speculation=Speculation([recorder]).build())
    recorder.outputs = 3
    with pytest.raises(effinfer.InvalidArgumentError, match="outputs: expected a list of strings"):
        make_engine(model, speculation=Speculation([recorder]).build())


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_what_numpy_computes(models, files, kind):
    """Of the pairs (hidden state, token) since a request's first one."""
    model = models["llama"]
    recorder = Recorder(model)
    heads = KINDS[kind](files[kind], length=4, width=1, adaptive=False).for_target(model)
    # A verifier whose tokens need not be plain decoding's gets the likeliest ones.
    verifier = _core.ReplayVerifier()
    speculation = Speculation([heads, recorder], controller=8, verify=verifier).build()
    asks = ragged(5, VOCAB, most=90)
    run(make_engine(model, speculation=speculation, precision="f32", prefix_cache=False), asks)
    name = model.graph.values[find_head(model.graph)["inputs"][1]]["weight_name"]
    reference = Reference(
        kind,
        random_weights(kind, SIZE),
        model.weights.dequantize(name)[TOKENS],
        model.weights.dequantize("token_embd.weight"),
        TOKENS,
    )
    compared = 0
    for request in range(1, 6):
        hidden: list[np.ndarray] = []
        tokens: list[int] = []
        for fact in (f for f in recorder.facts if f["request"] == request):
            draft = fact["proposed"]
            if tokens and draft is not None and len(draft) > 0:
                found, margin = reference.chain(np.stack(hidden), tokens, len(draft))
                if margin > 1e-3:
                    assert draft.tokens == [TOKENS[row] for row in found]
                    compared += len(draft)
            rows = fact["outputs"][hidden_of(model)]
            hidden += [rows[0], *(rows[node + 1] for node in fact["accepted"])]
            tokens += fact["tokens"][-fact["num_emitted"] :].tolist()
    assert compared > 300


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "f32", "max_batch_tokens": 17}, {"deterministic": True, "kv_dtype": "i8"}],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_heads_change_nothing(models, files, name, kind, options):
    width = 1 if options else 3
    heads = KINDS[kind](files[kind], width=width, adaptive=False).for_target(models[name])
    found = check(models[name], heads, name, **options)
    assert sum(m["drafted"] for m in found) > 60
    assert not any(m["refused_drafts"] for m in found)


@pytest.mark.parametrize("kind", KINDS)
def test_many_cancelled_and_preempted_requests(models, files, kind):
    model, asks = models["llama"], ragged(8, VOCAB)
    plain = run(make_engine(model, prefix_cache=False, precision="f32"), asks)
    heads = KINDS[kind](files[kind], adaptive=False).for_target(model)
    speculation = Speculation([heads], controller=6).build()
    engine = make_engine(model, speculation=speculation, num_pages=7, precision="f32")
    same(run(engine, asks), plain)
    assert engine.stats()["preemptions"] > 0
    again = run(engine, asks, cancel=(0, 4))
    kept = (1, 2, 3, 5, 6, 7)
    same([again[i] for i in kept], [plain[i] for i in kept])


@pytest.mark.parametrize("verify", ["rejection", "traversal"])
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_drafts_of_heads_are_verified(models, files, kind, verify):
    texts = []
    for _ in range(2):
        heads = KINDS[kind](files[kind], adaptive=False).for_target(models["llama"])
        speculation = Speculation([heads], verify=verify, controller=8).build()
        engine = make_engine(models["llama"], speculation=speculation, precision="f32")
        texts.append([answer.tokens for answer in run(engine, ragged(5, VOCAB, temperature=0.9))])
        assert sum(m["drafted"] for m in metrics(engine, 5)) > 60
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_of_heads_ends_drafts_and_is_told_once(models, folder, kind):
    weights = random_weights(kind, SIZE)
    last = list(weights)[-1] if kind != "eagle" else "eagle.down.weight"
    weights[last] = np.full_like(weights[last], np.nan)
    path = write_heads(folder / f"nan.{kind}.gguf", kind, weights, SIZE, VOCAB, TOKENS)
    model, asks = models["llama"], ragged(4, VOCAB)
    plain = run(make_engine(model, prefix_cache=False), asks)
    heads = KINDS[kind](path, adaptive=False).for_target(model)
    speculation = Speculation([heads], controller=8).build()
    engine = make_engine(model, prefix_cache=False, speculation=speculation)
    answers, warnings = warned(engine, asks)
    same(answers, plain)
    for messages in warnings.values():
        assert len(messages) == 1 and "NaN" in messages[0]


def test_heads_of_another_model_are_refused(models, files, folder):
    model = models["llama"]

    def refuses(part: str, path: Path, error: type[Exception] = effinfer.InvalidArgumentError):
        with pytest.raises(error, match=part):
            Medusa(path).for_target(model)

    def written(size: int = SIZE, vocab: int = VOCAB, tokens: list[int] = TOKENS) -> Path:
        weights = random_weights("medusa", size)
        return write_heads(folder / "wrong.gguf", "medusa", weights, size, vocab, tokens)

    refuses("expected kind medusa, got hydra", files["hydra"])
    refuses("expected hidden_size 64, got 96", written(size=96))
    refuses("expected vocab_size 259, got 300", written(vocab=300))
    refuses("tokens: expected ids in rising order", written(tokens=[5, 3]))
    refuses(r"rows: expected 0\.\.258, got 259", written(tokens=[5, 259]))
    refuses("expected a file with heads.kind", model.path, effinfer.FormatError)
    refuses("no such file|cannot|No such", folder / "nothing.gguf", effinfer.FileError)
    with pytest.raises(effinfer.InvalidArgumentError, match="of_target"):
        _core.draft_model_proposer(model.graph, model.weights, hidden=hidden_of(model))
    plain = _core.draft_model_proposer(
        model.graph, model.weights, of_target=True, hidden=hidden_of(model)
    )
    with pytest.raises(
        effinfer.InvalidArgumentError, match=r"expected the input %hidden f32\[T, 64"
    ):
        make_engine(model, speculation=Speculation([plain]).build())


def test_llm_takes_heads_by_both_names(models, files):
    with effinfer.LLM(models["llama"].path) as llm:
        params = effinfer.SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        prompt = list(range(5, 40))
        expected = llm.generate([prompt], params)[0].token_ids
    heads = replace(Hydra(files["hydra"]), adaptive=False)
    for options in ({"draft_model": heads}, {"speculation": heads}):
        with effinfer.LLM(models["llama"].path, **options) as llm:
            assert llm.generate([prompt], params)[0].token_ids == expected
            assert "proposer hydra" in llm.explain()


ON_GPU = """
import json, sys
from pathlib import Path
import numpy as np
import effinfer
from effinfer import techniques
from effinfer.checkpoints.model_files import open_model
from effinfer.speculation import Proposer, Speculation
from effinfer.techniques.vocab_trim import find_head

class Recorder(Proposer):
    name, top_k = "recorder", 3

    def __init__(self, hidden):
        self.outputs, self.facts = [hidden], []

    def propose(self, views):
        return [None] * len(views)

    def observe(self, facts):
        for fact in facts:
            found = (fact["outputs"][self.outputs[0]], fact["top_tokens"], fact["top_values"])
            self.facts.append([np.array(each).tolist() for each in found])

path, kind, heads = sys.argv[1:]
model = open_model(Path(path))
params = [
    effinfer.SamplingParams(temperature=t, seed=3, max_tokens=10, ignore_eos=True)
    for t in (0.0, 0.8)
]
prompts, texts = [list(range(5, 20)), [7]], []
for drafts in (False, True):
    recorder = Recorder(find_head(model.graph)["inputs"][0])
    options = {}
    if drafts:
        heads = getattr(techniques, kind)(heads, adaptive=False)
        options = {"speculation": Speculation([heads, recorder], controller=8)}
    llm = effinfer.LLM(path, device="cuda", precision="f32", max_seq_len=128, **options)
    outputs = llm.generate(prompts, params)
    texts.append([output.token_ids for output in outputs])
drafted = [output.metrics.speculation.drafted for output in outputs]
print(json.dumps([texts, drafted, llm.explain(), recorder.facts]))
"""


@pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")
@pytest.mark.parametrize("kind", ["eagle", "medusa"])  # of the others graphs and steps differ less
def test_heads_beside_a_target_on_a_gpu(models, files, kind):
    model = models["llama"]
    done = subprocess.run(
        [sys.executable, "-c", ON_GPU, str(model.path), KINDS[kind].__name__, str(files[kind])],
        env=os.environ | {"LD_PRELOAD": EMULATED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (plain, drafted_texts), drafted, explained, facts = json.loads(done.stdout)
    assert drafted_texts == plain
    assert min(drafted) > 3
    assert "device cuda:0" in explained and f"proposer {kind}" in explained
    name = model.graph.values[find_head(model.graph)["inputs"][1]]["weight_name"]
    head = model.weights.dequantize(name)
    compared = 0
    for rows, tokens, values in facts:
        if not values:
            continue
        highest = np.take_along_axis(np.array(rows) @ head.T, np.array(tokens), 1)
        np.testing.assert_allclose(highest, values, rtol=1e-3, atol=1e-3)
        compared += len(rows)
    assert compared > 10
