"""Records the bits of real models' results, to compare two builds of the package.

    PYTHON_OF_OLD tools/record_bits.py before.json
    PYTHON_OF_NEW tools/record_bits.py after.json --against before.json

Digests of logits, tokens with log-probabilities, and pages of the KV cache: each model, instruction
set, precision and KV type; prompts whole, in chunks and in batches; decoding, verification of
trees, sparse prefill. With --against the differing ones are listed, and the exit status is 1.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TEXT = Path(__file__).resolve().parents[1] / "tests" / "data" / "essay.txt"
MODELS = ("smollm2-135m", "gemma3-270m")
MODES: dict[str, dict[str, Any]] = {
    "fast": {},
    "deterministic": {"deterministic": True},
    "f32": {"precision": "f32"},
    "fast-f16": {"kv_dtype": "f16"},
    "fast-i8": {"kv_dtype": "i8"},
}
# A tree of drafts: the parent of each row, -1 for those that follow the prompt.
PARENTS = [-1, 0, 0, 1, 2, 2, -1, 6]


def digest(*parts: Any) -> str:
    sums = hashlib.sha256()
    for part in parts:
        sums.update(part if isinstance(part, bytes) else repr(part).encode())
    return sums.hexdigest()[:20]


class Recorder:
    def __init__(self, name: str, mode: str, short: bool) -> None:
        import effinfer

        self.effinfer = effinfer
        self.name, self.options, self.short = name, MODES[mode], short
        self.tokens: list[int] = self.load().tokenize(TEXT.read_text())

    def load(self, **options: Any) -> Any:
        limits = {"max_seq_len": 1024, "num_pages": 64, "prefix_cache": False}
        return self.effinfer.LLM(self.name, **{**limits, **self.options, **options})

    def record(self) -> dict[str, str]:
        found = {}
        llm = self.load()
        count = 40 if self.short else 150
        found["prefill"] = digest(llm.logits(self.tokens[:count]).tobytes())
        found["prefill in steps of 33"] = digest(
            self.load(max_batch_tokens=33).logits(self.tokens[:count]).tobytes()
        )
        found["decode"] = digest(llm.logits(self.tokens[: count // 8], phase="decode").tobytes())
        found["batch"] = self.texts(self.load(max_batch_tokens=48))
        found["tree"] = self.tree(llm)
        if not self.short and self.options == {}:
            for technique in ("minference", "sample_attention", "xattention"):
                found[technique] = self.sparse(technique)
        return found

    def texts(self, llm: Any) -> str:
        lengths = (1, 17, 64, 30) if self.short else (1, 17, 64, 65, 130, 31)
        prompts = [self.tokens[7 * i : 7 * i + length] for i, length in enumerate(lengths)]
        params = self.effinfer.SamplingParams(
            temperature=0.8, top_p=0.9, seed=5, max_tokens=8, ignore_eos=True, logprobs=5
        )
        outputs = llm.generate(prompts, params)
        return digest(*[(o.token_ids, [(s.logprob, s.top) for s in o.logprobs]) for o in outputs])

    def tree(self, llm: Any) -> str:
        """Logits of a tree after a prompt, and all pages of the cache."""
        from effinfer import _core

        options = dict(self.options)
        executable = _core.compile(
            llm.files.graph,
            llm.files.weights,
            _core.ThreadPool(0),
            _core.CompileOptions(max_seq_len=512, **options),
        )
        cache = executable.make_cache(8)
        prompt, rows = self.tokens[: 20 if self.short else 70], self.tokens[80 : 80 + len(PARENTS)]
        sequence, _ = cache.create(prompt)
        depth = []
        ancestors = []
        for row, parent in enumerate(PARENTS):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            ancestors.append((0 if parent < 0 else ancestors[parent]) | 1 << row)
        logits = []
        for new, phase, places, tree in (
            (prompt, "prefill", list(range(len(prompt))), None),
            (rows, "decode", [len(prompt) + d for d in depth], ancestors),
        ):
            cache.append(sequence, new)
            pages = cache.pages(sequence)
            extra = {} if tree is None else {"ancestors": tree}
            logits.append(
                executable.run(
                    token_ids=new,
                    positions=places,
                    qo_indptr=[0, len(new)],
                    kv_indptr=[0, len(pages)],
                    kv_indices=pages,
                    kv_len=[cache.length(sequence)],
                    logit_rows=list(range(len(new)))[-8:],
                    cache=cache,
                    phase=phase,
                    **extra,
                ).tobytes()
            )
            cache.commit(sequence, len(new))
        layers = llm.files.graph.metadata["num_layers"]
        contents = [
            view(layer, page).tobytes()
            for layer in range(layers)
            for page in cache.pages(sequence)
            for view in (cache.k_page, cache.v_page)
        ]
        return digest(*logits, *contents)

    def sparse(self, technique: str) -> str:
        from effinfer import techniques

        chosen = {
            "minference": techniques.MInference,
            "sample_attention": techniques.SampleAttention,
            "xattention": techniques.XAttention,
        }[technique](min_tokens=256)
        llm = self.load(prefill=chosen, max_batch_tokens=512)
        return digest(llm.logits(self.tokens[:900])[-64:].tobytes())


def record_all(models: list[str], levels: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for model in models:
        for level in levels:
            for mode in MODES:
                if level == "portable" and mode not in ("fast", "f32"):
                    continue
                command = [sys.executable, __file__, "--one", model, level, mode]
                environment = {**os.environ, "EFFINFER_ISA": level}
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"{model} {level} {mode}: {done.stderr}")
                for what, value in json.loads(done.stdout.splitlines()[-1]).items():
                    found[f"{model} {level} {mode}: {what}"] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--against", help="a record to compare with")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--levels", help="instruction sets; default: those of this CPU")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "LEVEL", "MODE"))
    arguments = parser.parse_args()
    if arguments.one:
        model, level, mode = arguments.one
        print(json.dumps(Recorder(model, mode, level == "portable").record()))
        return
    import effinfer

    levels = tuple(effinfer.info().available_isas)
    if arguments.levels:
        levels = tuple(arguments.levels.split(","))
    found = record_all(arguments.models.split(","), list(levels))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} digests")
    if arguments.against:
        before = json.loads(Path(arguments.against).read_text())
        differing = [key for key in found if key in before and found[key] != before[key]]
        print("\n".join(["differing:", *differing] if differing else ["all equal"]))
        sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
