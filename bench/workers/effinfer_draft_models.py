"""effinfer with models and heads that draft, for the section `draft_models`: an LLM for each target
and kind of drafts, all in one process.

  load     {targets: {name: path}, small, requantised, threads, context}    -> {}
  run      {target, drafts, prompt, count, temperature, top_p, seed}
           -> {seconds, tokens, steps, by_rows, drafted, accepted, drafting_s}: behind the first
           token; by_rows: steps of each number of rows
  first    {target, drafts, prompt}                      -> {seconds}: to the first token
  overlap  {target, drafts, prompt, count}               -> {share}: of the draft model's time
           beside steps of the target
  keep     {target, drafts}                              -> {}: only LLMs of that target and these
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from protocol import serve

import effinfer
from effinfer.techniques import DraftModel, Eagle, Hydra, Medusa, SkipLayers, VocabTrim

HEADS = Path(__file__).resolve().parents[2] / "examples" / "heads"
ROOT = HEADS.parent.parent
SMALL_LAYERS = 30  # of SmolLM2, with which its twin begins
LEFT_OUT = (4, 12, 17, 21, 22, 25)  # those without which it guesses best, one by one
CUT = 4096  # tokens
TRACED_STEPS = 16


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        self.given = request
        self.llms: dict[tuple[str, str], effinfer.LLM] = {}
        return {}

    def keep(self, request: dict[str, Any]) -> dict[str, Any]:
        for target, drafts in list(self.llms):
            if target != request["target"] or drafts not in request["drafts"]:
                self.llms.pop((target, drafts)).close()
        return {}

    def llm(self, request: dict[str, Any]) -> effinfer.LLM:
        key = (request["target"], request["drafts"])
        if key not in self.llms:
            given = self.given
            options = {"threads": given["threads"], "max_seq_len": given["context"]}
            options |= self.options(*key)
            self.llms[key] = effinfer.LLM(given["targets"][key[0]], **options)
        return self.llms[key]

    def options(self, target: str, drafts: str) -> dict[str, Any]:
        """What makes such an LLM."""
        small = self.given["small"]
        added = range(SMALL_LAYERS, 8 * SMALL_LAYERS) if target == "T" else ()
        fewer = SkipLayers([*LEFT_OUT, *added])
        match drafts:
            case "plain":
                return {}
            case "small":
                return {"draft_model": small}
            case "small, on a core of its own":
                beside = {"device": "cpu:0", "draft_device": "cpu:1", "threads": None}
                return {"draft_model": small, **beside}
            case "requantised":
                return {"draft_model": self.given["requantised"]}
            case "fewer layers":
                return {"draft_model": DraftModel(fewer)}
            case "fewer layers, cut head":
                return {"draft_model": DraftModel(fewer, head=self.cut_head(small))}
            case "medusa" | "hydra" | "eagle":
                kind = {"medusa": Medusa, "hydra": Hydra, "eagle": Eagle}[drafts]
                return {"draft_model": kind(HEADS / f"{drafts}.gguf")}
            case _:
                raise ValueError(f"no drafts {drafts}")

    def cut_head(self, small: str) -> VocabTrim:
        """The tokens that the project's own pages use most."""
        pages = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
        with effinfer.LLM(small, threads=1, max_seq_len=64) as llm:
            return VocabTrim.of_texts(pages, llm.tokenize, CUT)

    def add(self, request: dict[str, Any], count: int) -> int:
        params = effinfer.SamplingParams(
            temperature=request.get("temperature", 0.0),
            top_p=request.get("top_p", 1.0),
            seed=request.get("seed", 0),
            max_tokens=count,
            ignore_eos=True,
        )
        return self.llm(request).engine.add(request["prompt"], params.to_core())

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        engine = self.llm(request).engine
        request_id = self.add(request, request["count"])
        tokens: list[int] = []
        while not tokens:
            tokens += take(engine)
        by_rows: Counter[int] = Counter()
        drafted = engine.metrics(request_id)["speculation"]["drafted"]
        drafting = engine.stats()["drafting_s"]
        start = time.perf_counter()
        while engine.has_work():
            tokens += take(engine)
            before, drafted = drafted, engine.metrics(request_id)["speculation"]["drafted"]
            by_rows[1 + drafted - before] += 1
        seconds = time.perf_counter() - start
        metrics = engine.metrics(request_id)["speculation"]
        engine.forget(request_id)
        return {
            "seconds": seconds,
            "tokens": [tokens],
            "steps": by_rows.total(),
            "rows": sum(rows * steps for rows, steps in by_rows.items()),
            "by_rows": by_rows,
            "drafted": metrics["drafted"],
            "accepted": metrics["accepted"],
            "drafting_s": engine.stats()["drafting_s"] - drafting,
        }

    def first(self, request: dict[str, Any]) -> dict[str, Any]:
        engine = self.llm(request).engine
        start = time.perf_counter()
        request_id = self.add(request, 8)
        while not take(engine):
            pass
        seconds = time.perf_counter() - start
        engine.cancel(request_id)
        while engine.has_work():
            engine.step()
        engine.forget(request_id)
        return {"seconds": seconds}

    def overlap(self, request: dict[str, Any]) -> dict[str, Any]:
        engine = self.llm(request).engine
        request_id = self.add(request, request["count"])
        engine.start_profile(TRACED_STEPS + request["count"])
        while engine.has_work():
            take(engine)
        target, drafts = engine.take_profile(), engine.take_draft_profiles()
        engine.forget(request_id)
        (profile,) = drafts.values()
        return {"share": profile.overlapped_share(target)}


def take(engine: Any) -> list[int]:
    """The tokens of a step."""
    tokens = []
    for output in engine.step():
        if output.error or output.warning:
            raise RuntimeError(output.error or output.warning)
        tokens += output.token_ids
    return tokens


if __name__ == "__main__":
    worker = Worker()
    commands = (worker.load, worker.run, worker.first, worker.overlap, worker.keep)
    serve({command.__name__: command for command in commands})
