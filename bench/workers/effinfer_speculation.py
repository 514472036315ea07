"""effinfer with drafts and without, for the section `speculation`. One process holds the engines of
a model, on one pool of threads.

  load    {model, threads, context}                     -> {seconds}
  run     {drafts, nodes, prompts, texts, seeds, temperature, top_p, count, recorded}
          -> {seconds, tokens, steps, rows, by_rows, drafted, accepted, drafting_s}
          `count` tokens of every prompt. drafts: "plain", a name of techniques.SPECULATIONS, or
          "recorded: ..."; nodes: so many whatever they cost, or null; texts: to replay, or null.
          rows: of all steps. by_rows: steps of each number of rows, where there is one prompt.
  record  {prompt, text, nodes, drafts}                 -> {drafts}: that proposers make, a position
  costs   {prompt, rows, parents, count}                -> {seconds}: of a step, by number of rows;
          count: steps of each
  keep    {drafts}                                      -> {}: of the engines only these
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol import serve

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import open_model
from effinfer.speculation import DraftController, Proposer, Verifier
from effinfer.techniques import SPECULATIONS

SEQUENCES = 8
PAGES = 1024  # more than all prompts and outputs of a section: drafts take free pages only
MOST_NODES = 63
LEARNT_NODES = 4
UNLIKELY = 0  # a token that no draft here has
DRAFTED = ("drafted", "accepted")


class Recorded(Proposer):
    """Gives back what was recorded with the model that wrote the text: the logits of random weights
    know nothing of it."""

    name = "recorded"

    def __init__(self) -> None:
        self.drafts: list[list[list[Any]]] = []

    def propose(self, views: list[dict[str, Any]]) -> list[_core.Draft | None]:
        answers: list[_core.Draft | None] = []
        for view in views:
            position = len(view["tokens"]) - view["prompt_size"] - 1
            if position >= len(self.drafts):
                answers.append(None)
                continue
            tokens, parents, scores = self.drafts[position]
            count = min(len(tokens), view["max_nodes"])
            answers.append(_core.Draft(tokens[:count], parents[:count], scores[:count]))
        return answers


class Recorder(DraftController):
    """Remembers the drafts by position. Of the first few nodes those get a row, for proposers to
    learn from, that the text does not go on with: the others' logits come when they are roots,
    and would otherwise tell what follows them one step too early."""

    name = "recorder"

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.text: list[int] = []
        self.drafts: dict[int, list[list[Any]]] = {}

    def budget(self, view: dict[str, Any]) -> int:
        return self.nodes

    def choose(
        self, views: list[dict[str, Any]], drafts: list[_core.Draft], step: dict[str, int]
    ) -> list[list[int]]:
        kept: list[list[int]] = []
        for view, draft in zip(views, drafts, strict=True):
            position = len(view["tokens"]) - view["prompt_size"] - 1
            self.drafts[position] = [draft.tokens, draft.parents, draft.scores]
            next_token = self.text[position + 1 : position + 2]
            kept.append(
                [
                    node
                    for node in range(min(len(draft), LEARNT_NODES))
                    if draft.parents[node] >= 0 or [draft.tokens[node]] != next_token
                ]
            )
        return kept


class OneToken(Verifier):
    """Follows a text, one token a step: every position has a draft."""

    name = "one token"

    text: Iterator[int] = iter(())

    def verify(self, draft: _core.Draft, rows: _core.TokenRows) -> None:
        rows.emit(0, next(self.text, rows.sample(0)))


class Engine:
    """An engine and what belongs to its speculation."""

    def __init__(self, worker: "Worker", drafts: str, nodes: int | None) -> None:
        self.replay = _core.ReplayVerifier()
        self.recorded = Recorded()
        if drafts == "plain":
            proposers = []
        elif drafts.startswith("recorded"):
            proposers = [self.recorded]
        else:
            proposers = [recipe.build() for recipe in SPECULATIONS[drafts].proposers]
        controller = None if nodes is None else _core.fixed_controller(nodes)
        self.engine = worker.new_engine(_core.Speculation(proposers, self.replay, controller))
        self.primed: set[tuple[int, ...]] = set()

    def prime(self, prompts: list[list[int]]) -> None:
        """Leaves the prompts in the prefix cache: what is timed begins in one step."""
        params = effinfer.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True).to_core()
        for prompt in prompts:
            if tuple(prompt) in self.primed:
                continue
            self.primed.add(tuple(prompt))
            request = self.engine.add(prompt, params)
            while self.engine.has_work():
                self.engine.step()
            self.engine.forget(request)

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        self.prime(request["prompts"])
        engine, count = self.engine, request["count"]
        self.recorded.drafts = request["recorded"] or []
        ids = []
        for i, prompt in enumerate(request["prompts"]):
            params = effinfer.SamplingParams(
                temperature=request["temperature"],
                top_p=request["top_p"],
                max_tokens=count,
                seed=request["seeds"][i],
                ignore_eos=True,
            )
            ids.append(engine.add(prompt, params.to_core()))
            if request["texts"]:
                self.replay.set(ids[-1], request["texts"][i])
        tokens: dict[int, list[int]] = {i: [] for i in ids}
        seconds, steps, roots, by_rows = self.timed(tokens)
        metrics = [engine.metrics(i)["speculation"] for i in ids]
        drafting = engine.stats()["drafting_s"] - self.drafting_before
        for i in ids:
            engine.forget(i)
        totals = {key: sum(m[key] for m in metrics) for key in DRAFTED}
        return {
            "seconds": seconds,
            "tokens": list(tokens.values()),
            "steps": steps,
            "rows": roots + totals["drafted"],
            "by_rows": by_rows,
            "drafted": totals["drafted"],
            "accepted": totals["accepted"],
            "drafting_s": drafting,
        }

    def timed(self, tokens: dict[int, list[int]]) -> tuple[float, int, int, dict[int, int]]:
        """Seconds, steps, undrafted rows, and of a single request the steps of each number of rows,
        from the step on that gave every request its first token."""
        engine = self.engine
        self.take(tokens)
        if not all(len(text) == 1 for text in tokens.values()):
            raise RuntimeError("the prompts did not fit into one step")
        self.drafting_before = engine.stats()["drafting_s"]
        steps = roots = drafted = 0
        by_rows: dict[int, int] = {}
        single = next(iter(tokens)) if len(tokens) == 1 else None
        start = time.perf_counter()
        while engine.has_work():
            steps += 1
            roots += self.take(tokens)
            if single is None:
                continue
            before, drafted = drafted, engine.metrics(single)["speculation"]["drafted"]
            rows = 1 + drafted - before
            by_rows[rows] = by_rows.get(rows, 0) + 1
        return time.perf_counter() - start, steps, roots, by_rows

    def step_times(
        self, prompt: list[int], text: list[int], drafts: list[list[list[Any]]]
    ) -> list[float]:
        """Seconds of each step of a text but the first, without those spent on drafts. The request
        has room for more: what is left of it bounds the depth of a draft."""
        self.prime([prompt])
        self.recorded.drafts = drafts
        params = effinfer.SamplingParams(
            temperature=0.0, max_tokens=len(text) + MOST_NODES + 1, ignore_eos=True
        )
        request = self.engine.add(prompt, params.to_core())
        self.replay.set(request, text)
        self.engine.step()
        times = []
        for _ in text[1:]:
            before = self.engine.stats()["drafting_s"]
            start = time.perf_counter()
            self.engine.step()
            seconds = time.perf_counter() - start
            times.append(seconds - (self.engine.stats()["drafting_s"] - before))
        self.engine.cancel(request)
        self.engine.step()
        self.engine.forget(request)
        return times

    def take(self, tokens: dict[int, list[int]]) -> int:
        outputs = self.engine.step()
        for output in outputs:
            if output.error or output.warning:
                raise RuntimeError(output.error or output.warning)
            tokens[output.request] += output.token_ids
        return len(outputs)


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        self.pool = _core.ThreadPool(request["threads"])
        self.files = open_model(Path(request["model"]))
        self.context = request["context"]
        self.recordings: dict[str, tuple[_core.Engine, Recorder, OneToken]] = {}
        self.engines: dict[tuple[str, int | None], Engine] = {}
        return {"seconds": time.perf_counter() - start}

    def new_engine(self, speculation: _core.Speculation) -> _core.Engine:
        return _core.Engine(
            self.files.graph,
            self.files.weights,
            self.pool,
            max_seq_len=self.context,
            max_sequences=SEQUENCES,
            num_pages=PAGES,
            max_batch_tokens=1024,
            prefix_cache=True,
            speculation=speculation,
        )

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        key = (request["drafts"], request["nodes"])
        if key not in self.engines:
            self.engines[key] = Engine(self, *key)
        return self.engines[key].run(request)

    def keep(self, request: dict[str, Any]) -> dict[str, Any]:
        self.engines = {k: e for k, e in self.engines.items() if k[0] in request["drafts"]}
        return {}

    def record(self, request: dict[str, Any]) -> dict[str, Any]:
        text, name = request["text"], request["drafts"]
        if name not in self.recordings:  # kept: proposers remember the texts before
            recorder, verifier = Recorder(request["nodes"]), OneToken()
            proposers = [recipe.build() for recipe in SPECULATIONS[name].proposers]
            parts = _core.Speculation(proposers, verifier, recorder)
            self.recordings[name] = (self.new_engine(parts), recorder, verifier)
        engine, recorder, verifier = self.recordings[name]
        recorder.text, recorder.drafts, verifier.text = text, {}, iter(text)
        params = effinfer.SamplingParams(max_tokens=len(text), temperature=0.0, ignore_eos=True)
        request_id = engine.add(request["prompt"], params.to_core())
        while engine.has_work():
            for output in engine.step():
                if output.error or output.warning:
                    raise RuntimeError(output.error or output.warning)
        engine.forget(request_id)
        none: list[list[Any]] = [[], [], []]
        return {"drafts": [recorder.drafts.get(i, none) for i in range(len(text))]}

    def costs(self, request: dict[str, Any]) -> dict[str, Any]:
        """Medians of steps with drafts that nobody accepts, chains or by `parents`, without the
        time that proposer and controller take."""
        key = ("recorded", MOST_NODES)
        if key not in self.engines:
            self.engines[key] = Engine(self, *key)
        prompt, count = request["prompt"], request["count"]
        seconds = {}
        for rows in request["rows"]:
            parents = request.get("parents") or list(range(-1, rows - 2))
            wrong = [prompt[i % len(prompt)] for i in range(len(parents))]
            draft = [wrong, parents, [0.5] * len(parents)]
            times = self.engines[key].step_times(prompt, [UNLIKELY] * count, [draft] * count)
            seconds[str(rows)] = statistics.median(times)
        return {"seconds": seconds}


if __name__ == "__main__":
    worker = Worker()
    commands = (worker.load, worker.run, worker.keep, worker.record, worker.costs)
    serve({command.__name__: command for command in commands})
