"""Speed and fidelity of effinfer and its peers on the same files: writes docs/performance.md.

Every engine runs in a process (and a virtual environment) of its own; their measurements alternate
in one run, so that the machine's moods hit all of them. `--only` measures some of the sections
again and keeps the others from the last run on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import draft_models
import fidelity
import gguf
import machine
import operators
import peers
import plots
import report
import serving
import speculation
import speed
import store
from rounds import Say
from sections import SECTIONS, Setting
from worker import EngineSpec

import effinfer
from effinfer.hub import resolve

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = ROOT / "build" / "bench"
MODELS = ["smollm2-135m", "gemma3-270m"]
WORKER = "effinfer_worker.py"
ALL_SECTIONS = {
    **SECTIONS,
    **serving.SECTIONS,
    **speculation.SECTIONS,
    **draft_models.SECTIONS,
    **operators.SECTIONS,
}
NAMES = ["speed", "fidelity", *ALL_SECTIONS]


def say(text: str) -> None:
    print(f"bench: {text}", flush=True)


def tell(subject: str) -> Say:
    return lambda text: say(f"{subject}: {text}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(NAMES), help=f"of {','.join(NAMES)}")
    parser.add_argument("--model", action="append", help="a name or a path; repeat for several")
    parser.add_argument("--threads", type=int, help="default: what effinfer.info() chooses")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=512, help="tokens")
    parser.add_argument("--decode", type=int, default=128, help="tokens")
    parser.add_argument("--positions", type=int, default=1024, help="of the fidelity text")
    parser.add_argument(
        "--quick", action="store_true", help="short lengths: a test of the harness, no measurement"
    )
    parser.add_argument(
        "--peer-env",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="use the python of this virtual environment for a peer",
    )
    parser.add_argument("--peers", nargs="*", default=list(peers.PEERS_BY_NAME))
    parser.add_argument("--results", type=Path, default=store.RESULTS)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "performance.md")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if wrong := set(options.only) - set(NAMES):
        parser.error(f"--only: {', '.join(wrong)}: expected some of {', '.join(NAMES)}")
    return options


def peer_specs(names: list[str], given: list[str]) -> tuple[list[EngineSpec], dict[str, str]]:
    """The peers that run here, and why the others do not."""
    environments = dict(item.split("=", 1) for item in given)
    specs, missing = [], {}
    for name in names:
        peer = peers.PEERS_BY_NAME[name]
        try:
            if name in environments:
                python = Path(environments[name]) / "bin" / "python"
            else:
                python = peers.ensure(peer)
            specs.append(EngineSpec(name, python, peer.worker))
        except peers.PeerUnavailable as error:
            missing[name] = str(error)
            say(f"{name}: {error}")
    return specs, missing


def own_specs() -> tuple[EngineSpec, list[EngineSpec]]:
    """effinfer as users get it; capped at each lower level that is worth a row, and with
    deterministic=True."""
    python = Path(sys.executable)
    default = EngineSpec("effinfer", python, WORKER)
    facts = effinfer.info()
    levels = [level for level in facts.available_isas if level not in ("portable", facts.isa)]
    capped = [
        EngineSpec(f"effinfer, {level}", python, WORKER, {"EFFINFER_ISA": level})
        for level in levels
    ]
    exact = EngineSpec("effinfer, deterministic", python, WORKER, {}, {"deterministic": True})
    return default, [*capped, exact]


def weight_bytes(reader: gguf.GGUFReader) -> int:
    """Bytes of the file's tensors that one token reads: all, but an embedding that is no head."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight")
    return sum(sizes.values())


def kv_token_bytes(reader: gguf.GGUFReader) -> int:
    """Bytes of bf16 keys and values of one token."""
    wanted = ("attn_k.weight", "attn_v.weight")
    return sum(2 * int(t.shape[1]) for t in reader.tensors if t.name.endswith(wanted))


def vocabulary(reader: gguf.GGUFReader) -> int:
    return int(next(t for t in reader.tensors if t.name == "token_embd.weight").shape[1])


def bench_model(
    setting: Setting,
    reader: gguf.GGUFReader,
    options: argparse.Namespace,
    variants: list[EngineSpec],
) -> dict[str, Any]:
    """Speed and fidelity on one file."""
    path = setting.model
    measured: dict[str, Any] = {
        "file": path.name,
        "file_bytes": path.stat().st_size,
        "weight_bytes": weight_bytes(reader),
        "kv_token_bytes": kv_token_bytes(reader),
    }
    if "speed" in options.only:
        own = [setting.own, *setting.peers]
        measured["engines"] = speed.measure_speed(own, setting, tell(path.name), variants)
    if "fidelity" in options.only:
        exact = replace(setting.own, name="effinfer, f32", load_options={"precision": "f32"})
        specs = [setting.own, exact, *setting.only("llama.cpp")[1:]]
        measured["fidelity"] = fidelity.measure_fidelity(
            specs, path, setting.own, setting.threads, options.positions, SCRATCH, tell(path.name)
        )
    return measured


def timed(name: str, options: argparse.Namespace, measure: Any) -> Any:
    load, start = os.getloadavg()[0], time.perf_counter()
    measured = measure()
    seconds = time.perf_counter() - start
    say(f"{name} took {seconds:.0f} s")
    return {
        **measured,
        "load_average": load,
        "repeats": options.repeats,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    options = arguments()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    facts = effinfer.info()
    threads = options.threads or facts.threads
    about = machine.describe(threads, SCRATCH)
    specs, missing = peer_specs(options.peers, options.peer_env)
    target = store.path_of(about, options.results)
    result = store.load(target)
    if "speed" in options.only or "machine" not in result:
        result["machine"] = about
    result |= {
        "effinfer": facts.to_dict(),
        "prefill_tokens": options.prefill,
        "decode_tokens": options.decode,
        "repeats": options.repeats,
        "missing_peers": missing,
    }
    if about["load_average"] > report.BUSY:
        say(f"the machine is busy (load average {about['load_average']:.1f})")
    own, variants = own_specs()
    setting = Setting(
        model=Path(),
        vocab_size=0,
        threads=threads,
        repeats=options.repeats,
        decode_tokens=options.decode,
        prefill_tokens=options.prefill,
        own=own,
        peers=specs,
        log=SCRATCH / "workers.log",
        quick=options.quick,
    )
    for index, name in enumerate(options.model or MODELS):
        path = Path(resolve(name))
        reader = gguf.GGUFReader(str(path))
        of_model = replace(setting, model=path, vocab_size=vocabulary(reader))
        if {"speed", "fidelity"} & set(options.only):
            measure = partial(bench_model, of_model, reader, options, variants)
            store.put_model(result, timed(path.name, options, measure))
            store.save(target, result)
        if index == 0:  # the other sections are of the first model
            first = of_model
    for name in options.only:
        section = ALL_SECTIONS.get(name)
        if section is None:
            continue
        measure = partial(section, first, tell(name))
        result["sections"][name] = timed(name, options, measure)
        store.save(target, result)
    say(f"{target} written")
    first, *others = store.by_coverage(options.results)
    plots.draw(first, options.document.parent / "plots")
    report.write(first, others, options.document)
    say(f"{options.document} written")


if __name__ == "__main__":
    main()
