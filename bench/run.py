"""Speed and fidelity of effinfer and its peers on the same files: writes docs/performance.md.

Every engine runs in a process (and a virtual environment) of its own, on the same number of
threads; their measurements alternate in one run, so that the machine's moods hit all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import fidelity
import gguf
import machine
import peers
import report
import speed
from worker import EngineSpec

import effinfer
from effinfer.hub import resolve

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = ROOT / "build" / "bench"
RESULTS = ROOT / "bench" / "results"
MODELS = ["smollm2-135m", "gemma3-270m"]
WORKER = "effinfer_worker.py"


def say(text: str) -> None:
    print(f"bench: {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="a name or a path; repeat for several")
    parser.add_argument("--threads", type=int, help="default: what effinfer.info() chooses")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prefill", type=int, default=512, help="tokens")
    parser.add_argument("--decode", type=int, default=128, help="tokens")
    parser.add_argument("--positions", type=int, default=1024, help="of the fidelity text; 0: off")
    parser.add_argument(
        "--peer-env",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="use the python of this virtual environment for a peer (llama.cpp, openvino)",
    )
    parser.add_argument("--peers", nargs="*", default=list(peers.PEERS_BY_NAME))
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "performance.md")
    return parser.parse_args()


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


def own_specs() -> tuple[list[EngineSpec], list[EngineSpec]]:
    """effinfer as users get it, and capped at each lower level that is worth a row."""
    python = Path(sys.executable)
    default = EngineSpec("effinfer", python, WORKER)
    available = effinfer.info().available_isas
    levels = [level for level in available if level not in ("portable", effinfer.info().isa)]
    capped = [
        EngineSpec(f"effinfer, {level}", python, WORKER, {"EFFINFER_ISA": level})
        for level in levels
    ]
    return [default], capped


def weight_bytes(reader: gguf.GGUFReader) -> int:
    """Bytes of the file's tensors that one token reads: all, but an embedding that is no head."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight")
    return sum(sizes.values())


def bench_model(
    path: Path, options: argparse.Namespace, threads: int, peer: list[EngineSpec]
) -> Any:
    reader = gguf.GGUFReader(str(path))
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    settings = speed.Settings(
        threads=threads,
        repeats=options.repeats,
        prefill_tokens=options.prefill,
        decode_tokens=options.decode,
        decode_prompt_tokens=32,
        vocab_size=int(embedding.shape[1]),
        log=SCRATCH / "workers.log",
    )
    own, capped = own_specs()
    tell = lambda text: say(f"{path.name}: {text}")  # noqa: E731
    loads = speed.measure_loads(own + peer, path, settings, tell)
    working = [spec for spec in own + peer if "error" not in loads[spec.name]]
    rates = speed.measure_speed(working + capped, path, settings, tell)
    engines = {name: {**loads.get(name, {}), **rates.get(name, {})} for name in [*loads, *rates]}
    rows = []
    if options.positions:
        exact = EngineSpec("effinfer, f32", own[0].python, WORKER, {}, {"precision": "f32"})
        measured = [*own, exact, *(spec for spec in working if spec.name == "llama.cpp")]
        rows = fidelity.measure_fidelity(
            measured, path, own[0], threads, options.positions, SCRATCH, tell
        )
    return {
        "file": path.name,
        "file_bytes": path.stat().st_size,
        "weight_bytes": weight_bytes(reader),
        "engines": engines,
        "fidelity": rows,
    }


def main() -> None:
    options = arguments()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    threads = options.threads or effinfer.info().threads
    about = machine.describe(threads, SCRATCH)
    specs, missing = peer_specs(options.peers, options.peer_env)
    result: dict[str, Any] = {
        "machine": about,
        "effinfer": effinfer.info().to_dict(),
        "prefill_tokens": options.prefill,
        "decode_tokens": options.decode,
        "repeats": options.repeats,
        "missing_peers": missing,
        "models": [],
    }
    if about["load_average"] > report.BUSY:
        say(f"the machine is busy (load average {about['load_average']:.1f})")
    for name in options.model or MODELS:
        path = Path(resolve(name))
        result["models"].append(bench_model(path, options, threads, specs))
    target = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.write_text(json.dumps(result, indent=1, default=str) + "\n")
    say(f"{target} written")
    report.write(result, options.document)
    say(f"{options.document} written")


if __name__ == "__main__":
    main()
