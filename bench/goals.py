"""The summary at the top of docs/performance.md: what was aimed at, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draft_models_report import draft_model_rows
from goal_row import Row
from serving_report import serving_rows
from speculation_report import speculation_rows

HEADER = ["what", "effinfer", "compared with", "ratio", "goal", "met", "bound"]
NO_AMX = "no AMX on this machine"
DEPTH = "4096"
NOISE = 0.02  # of a time: steps of 3 and 4 rows run the same kernel

Json = dict[str, Any]


def median(engines: Json, name: str, key: str) -> float | None:
    value: float | None = engines.get(name, {}).get(key, {}).get("median")
    return value


def against(
    what: str, engines: Json, ours: str, peer: str, key: str, goal: float, bound: str = ""
) -> Iterator[Row]:
    """A rate in tokens per second against a peer's; nothing where one of them is missing."""
    mine, other = median(engines, ours, key), median(engines, peer, key)
    if mine and other:
        compared = f"{peer} {other:.1f}"
        yield Row(what, f"{mine:.1f} tok/s", compared, mine / other, goal, bound)


def model_named(result: Json, prefix: str) -> Json:
    for model in result["models"]:
        if model["file"].lower().startswith(prefix):
            return dict(model)
    return {}


def engines_of(result: Json, section: str) -> Json:
    return dict(result["sections"].get(section, {}).get("engines", {}))


def decode_bound(result: Json, model: Json, depth: int = 0) -> float | None:
    """Tokens per second at which memory can deliver the weights and the keys and values."""
    bandwidth = result["machine"].get("read_bytes_per_s")
    if not bandwidth or "weight_bytes" not in model:
        return None
    return float(bandwidth / (model["weight_bytes"] + depth * model.get("kv_token_bytes", 0)))


def memory_text(bound: float | None) -> str:
    return f"memory: {bound:.0f} tok/s" if bound else ""


def goal(result: Json, with_amx: float, without: float) -> float:
    """What a machine of its kind is to reach."""
    return with_amx if "amx" in result["effinfer"]["isa"] else without


def speed_rows(result: Json) -> Iterator[Row]:
    smol, gemma = model_named(result, "smollm2"), model_named(result, "gemma")
    engines, isa = smol.get("engines", {}), result["effinfer"]["isa"]
    bound, key = decode_bound(result, smol), "decode_tok_s"
    memory, sums = memory_text(bound), "arithmetic"
    least = goal(result, 4.5, 2.2)
    yield from against("SmolLM2 Q4_1 decode", engines, "effinfer", "llama.cpp", key, least, memory)
    mine = median(engines, "effinfer", key)
    if mine and bound:
        what = "SmolLM2 Q4_1 decode, share of the memory bound"
        yield Row(what, f"{mine:.1f} tok/s", f"{bound:.0f} tok/s", mine / bound, 0.7, unit="%")
    if "amx" in isa:
        what = "SmolLM2 Q4_1 prefill (AMX)"
        yield from against(what, engines, "effinfer", "openvino", "prefill_tok_s", 2, sums)
        yield from against(what, engines, "effinfer", "llama.cpp", "prefill_tok_s", 8, sums)
    more = gemma.get("engines", {})
    memory_2 = memory_text(decode_bound(result, gemma))
    least = goal(result, 2.5, 1.5)
    yield from against("Gemma 3 Q4_K_M decode", more, "effinfer", "llama.cpp", key, least, memory_2)
    mine, bound_2 = median(more, "effinfer", key), decode_bound(result, gemma)
    if mine and bound_2:
        what = "Gemma 3 Q4_K_M decode, share of the memory bound"
        share, least = mine / bound_2, goal(result, 0.85, 0.8)
        yield Row(what, f"{mine:.1f} tok/s", f"{bound_2:.0f} tok/s", share, least, unit="%")
    what = "Gemma 3 Q4_K_M prefill"
    yield from against(what, more, "effinfer", "llama.cpp", "prefill_tok_s", 5, sums)
    for level, goals in (("avx512", (2.2, 2.5)), ("avx2", (1.5, 1.3))):
        ours = "effinfer" if isa == level else f"effinfer, {level}"
        peer = "llama.cpp, avx2" if level == "avx2" != isa else "llama.cpp"
        yield from against(f"{level}: decode", engines, ours, peer, key, goals[0], memory)
        yield from against(
            f"{level}: prefill", engines, ours, peer, "prefill_tok_s", goals[1], sums
        )


def scaling(what: str, engines: Json, keys: tuple[tuple[str, str], tuple[str, str]],
            goal: float, bound: str) -> Iterator[Row]:  # fmt: skip
    """One of our rates against another of ours: keys are (engine, question) of both."""
    more, one = (median(engines, *key) for key in keys)
    if more and one:
        yield Row(what, f"{more:.1f} tok/s", f"{one:.1f} tok/s", more / one, goal, bound)


def sequence_rows(result: Json) -> Iterator[Row]:
    bound = decode_bound(result, model_named(result, "smollm2"), int(DEPTH))
    yield from against(
        f"decode at {DEPTH} tokens of context, bf16 KV", engines_of(result, "context"),
        "effinfer", "llama.cpp", DEPTH, 2, memory_text(bound),
    )  # fmt: skip
    yield from scaling(
        "8 requests decoding together against one", engines_of(result, "batch"),
        (("effinfer", "8"), ("effinfer", "1")), 4, "memory: 8x; then arithmetic",
    )  # fmt: skip
    verify = engines_of(result, "verify")
    eight, one = median(verify, "effinfer", "8"), median(verify, "effinfer", "1")
    if eight and one:
        yield Row(
            "verifying 8 tokens in one step against one token", f"{1e3 * eight:.2f} ms",
            f"{1e3 * one:.2f} ms", eight / one, 1.6, "memory: 1x; then arithmetic", at_most=True,
        )  # fmt: skip
    yield from step_rows(result)
    bandwidth = result["machine"].get("read_bytes_per_s")
    single = result["machine"].get("read_bytes_per_s_1_thread")
    known = f"memory: {bandwidth / single:.2f}x" if bandwidth and single else ""
    engines = engines_of(result, "threads")
    for key, goal, limit in (("decode", 1.7, known), ("prefill", 1.85, "2x")):
        names = ("effinfer, 2 threads", key), ("effinfer, 1 thread", key)
        yield from scaling(f"{key}: 2 threads against 1", engines, names, goal, limit)


def step_rows(result: Json) -> Iterator[Row]:
    """Steps of several rows against llama.cpp's, and against our own of fewer rows."""
    verify = engines_of(result, "verify")
    for tokens, least in (("2", (5, 3.5)), ("4", (6, 5)), ("8", (7, 6))):
        ours, other = median(verify, "effinfer", tokens), median(verify, "llama.cpp", tokens)
        if ours and other:
            yield Row(
                f"a step of {tokens} tokens of one sequence", f"{1e3 * ours:.2f} ms",
                f"llama.cpp {1e3 * other:.2f} ms", other / ours, goal(result, *least),
            )  # fmt: skip
    yield from against(
        "8 requests decoding together", engines_of(result, "batch"),
        "effinfer", "llama.cpp", "8", goal(result, 7, 5),
    )  # fmt: skip
    counts = sorted((key for key in verify.get("effinfer", {}) if key.isdecimal()), key=int)
    times = [time for key in counts if (time := median(verify, "effinfer", key))]
    if len(times) > 1:
        ratio, at = min((b / a, i) for i, (a, b) in enumerate(zip(times, times[1:], strict=False)))
        yield Row(
            f"time of a step with more rows: least growth, {counts[at]} to {counts[at + 1]}",
            f"{1e3 * times[at + 1]:.2f} ms", f"{1e3 * times[at]:.2f} ms", ratio, 1 - NOISE,
        )  # fmt: skip
    lengths = engines_of(result, "lengths")
    for length in ("512", "2048"):
        yield from against(
            f"SmolLM2 prefill of {length}, fresh prompts", lengths, "effinfer", "openvino", length,
            goal(result, 2, 1.1), "arithmetic",
        )  # fmt: skip


def memory_rows(result: Json) -> Iterator[Row]:
    for model in result["models"]:
        engine = model.get("engines", {}).get("effinfer", {})
        if "peak_rss_bytes" not in engine:
            continue
        # Keys and values of the longest prompt measured: pages never used are no memory.
        kv = model.get("kv_token_bytes", 0) * result["prefill_tokens"]
        allowed = 1.25 * model["file_bytes"] + kv
        peak = engine["peak_rss_bytes"]
        yield Row(
            f"peak memory, {model['file']}", f"{peak / 1e6:.0f} MB",
            f"file + 25 % + KV: {allowed / 1e6:.0f} MB", peak / allowed, 1, at_most=True,
        )  # fmt: skip
        base = engine.get("base_rss_bytes")
        if base:
            own = peak - base
            yield Row(
                f"the same without Python and its packages ({base / 1e6:.0f} MB before loading)",
                f"{own / 1e6:.0f} MB", f"{allowed / 1e6:.0f} MB", own / allowed, 1, at_most=True,
            )  # fmt: skip


def library_rows(result: Json) -> Iterator[Row]:
    for key, mine, others in operator_cells(result, "library"):
        own, other = mine["effinfer"], others["torch"]
        least = goal(result, 1.2, 2.5) if key == "prefill of 1,024, bf16" else 1.5
        yield Row(
            f"ops, {key}", f"{1e6 * own:.0f} us", f"torch {1e6 * other:.0f} us", other / own, least
        )  # fmt: skip
    engines = engines_of(result, "library")
    for dtype in ("bf16", "f32"):
        seconds = {
            name: median(engines, "effinfer", f"{case}, {dtype}")
            for name, case in {
                "own": "decode, 16 x 4,096, own pages",
                "shared": "decode, 16 x 4,096, one prefix",
                "dense": "4,096 x 4,096, dense",
                "part": "4,096 x 4,096, 6 of 64 blocks",
                "long": "decode, 1 x 32,768",
                "halves": "decode, 2 x 16,384",
            }.items()
        }
        if seconds["long"] and seconds["halves"]:
            yield Row(
                f"ops, decode, one text of 32,768 against two of 16,384, {dtype}",
                f"{1e3 * seconds['long']:.1f} ms", f"{1e3 * seconds['halves']:.1f} ms",
                seconds["long"] / seconds["halves"], 1.15, at_most=True,
            )  # fmt: skip
        if not all(seconds[name] for name in ("own", "shared", "dense", "part")):
            continue
        yield Row(
            f"ops, 16 requests on one prefix of 4,096, {dtype}",
            f"{1e3 * seconds['shared']:.1f} ms", f"not shared {1e3 * seconds['own']:.1f} ms",
            seconds["own"] / seconds["shared"], 5, "memory; then arithmetic",
        )  # fmt: skip
        part = seconds["dense"] * 6 / 64
        yield Row(
            f"ops, 6 of 64 blocks of 4,096 x 4,096, {dtype}", f"{1e3 * seconds['part']:.0f} ms",
            f"as much of dense {1e3 * part:.0f} ms", seconds["part"] / part, 1.3, at_most=True,
        )  # fmt: skip


# Seconds of a product with a ternary matrix of 6912 x 2560 on one thread that kernels should take
# at most: [level][question].
TERNARY_LIMITS = {
    "amx": {"n=8": 230e-6, "n=128": 1.8e-3},
    "avx512": {"n=1": 140e-6, "n=1, from memory": 260e-6, "n=8": 430e-6, "n=128": 6.5e-3},
    "avx2": {"n=1": 190e-6, "n=8": 950e-6, "n=128": 16e-3},
}
TERNARY_BOUNDS = {
    ("avx512", "n=1, from memory"): "memory",
    ("avx512", "n=8"): "602 us: one 512-bit VPDPBUSD a cycle",
    ("avx512", "n=128"): "9.6 ms: one 512-bit VPDPBUSD a cycle",
}


def ternary_rows(result: Json) -> Iterator[Row]:
    engines = engines_of(result, "ternary")
    best = ("effinfer, t2", "effinfer, t1_6")
    levels = {result["effinfer"]["isa"]: best}
    levels.setdefault("avx2", ("effinfer, AVX2",))
    for level, names in levels.items():
        for key, limit in TERNARY_LIMITS.get(level, {}).items():
            times = [time for name in names if (time := median(engines, name, key))]
            if times:
                yield Row(
                    f"ternary 6912 x 2560, {level}, {key}", f"{1e6 * min(times):.0f} us",
                    f"{1e6 * limit:.0f} us", min(times) / limit, 1,
                    TERNARY_BOUNDS.get((level, key), ""), at_most=True,
                )  # fmt: skip
    for key in TERNARY_LIMITS["avx512"]:
        ours = [time for name in best if (time := median(engines, name, key))]
        theirs = [
            (time, name)
            for name in ("llama.cpp, TQ2_0", "llama.cpp, TQ1_0")
            if (time := median(engines, name, key))
        ]
        if ours and theirs:
            other, name = min(theirs)
            yield Row(
                f"ternary 6912 x 2560, the better packing, {key}", f"{1e6 * min(ours):.0f} us",
                f"{name} {1e6 * other:.0f} us", other / min(ours), 1,
            )  # fmt: skip


# Seconds of bitnet.cpp's I2_S for 128 tokens of a matrix of 6912 x 2560 on one thread, as known of
# another machine (docs/performance.md).
BITNET_CPP_SECONDS = 21.6e-3
BITNET_MATRICES = 30 * (2 * 2560 * 2560 + 2 * 640 * 2560 + 3 * 6912 * 2560) / (6912 * 2560)


def bitnet_rows(result: Json) -> Iterator[Row]:
    engines = engines_of(result, "bitnet")
    decode, memory, prefill = (
        median(engines, "effinfer", key) for key in ("decode", "memory", "prefill")
    )
    if not (decode and memory and prefill):
        return
    yield Row("BitNet 2B4T decode, share of the memory bound", f"{decode:.1f} tok/s",
              f"{memory:.1f} tok/s", decode / memory, 0.85, unit="%")  # fmt: skip
    theirs = 128 / (BITNET_MATRICES * BITNET_CPP_SECONDS) * result["machine"]["threads"]
    yield Row("BitNet 2B4T prefill, all of it", f"{prefill:.0f} tok/s",
              f"bitnet.cpp's products alone (quoted) {theirs:.0f}", prefill / theirs, 10,
              "one 512-bit VPDPBUSD a cycle")  # fmt: skip


def large_rows(result: Json) -> Iterator[Row]:
    engines, what = engines_of(result, "large"), "8B shape, Q4_K"
    peers = ("effinfer", "llama.cpp")
    memory = median(engines, "effinfer", "memory")
    yield from against(
        f"{what}: decode", engines, *peers, "decode", goal(result, 1.6, 1.4), memory_text(memory)
    )
    yield from against(
        f"{what}: prefill of {result['prefill_tokens']}", engines, *peers, "prefill",
        goal(result, 8, 2.5), "arithmetic",
    )  # fmt: skip
    decode = median(engines, "effinfer", "decode")
    if decode and memory:
        yield Row(
            f"{what}: decode, share of the memory bound", f"{decode:.2f} tok/s",
            f"{memory:.2f} tok/s", decode / memory, goal(result, 0.9, 0.85), unit="%",
        )  # fmt: skip


def drafted_rows(result: Json) -> Iterator[Row]:
    section = result["sections"].get("speculation")
    if section:
        yield from speculation_rows(section)
    section = result["sections"].get("draft_models")
    if section:
        yield from draft_model_rows(section)


def served_rows(result: Json) -> Iterator[Row]:
    section = result["sections"].get("serving")
    return serving_rows(section) if section else iter(())


def rows(result: Json) -> list[list[str]]:
    sources = (speed_rows, sequence_rows, operator_rows, ternary_rows, bitnet_rows, large_rows,
               drafted_rows, served_rows, memory_rows)  # fmt: skip
    cells = [row.cells() for source in sources for row in source(result)]
    if "amx" not in result["effinfer"]["isa"]:
        for what, goal in (
            ("SmolLM2 Q4_1 prefill (AMX)", ">= 2x openvino, 8x llama.cpp"),
            ("matmul 4096x4096 at n = 128 (AMX)", "> 1 TFLOP/s a core"),
            ("ternary 6912 x 2560, n=8 and n=128 (AMX)", "<= 230 us, 1800 us"),
        ):
            cells.append([what, "-", "-", "-", goal, NO_AMX, "-"])
    return cells


def operator_cells(
    result: Json, section: str
) -> list[tuple[str, dict[str, float], dict[str, float]]]:
    """(question, our values, the peers' values), by engine, of what some peer answered too."""
    engines = engines_of(result, section)
    keys = [key for key, value in engines.get("effinfer", {}).items() if isinstance(value, dict)]
    cells = []
    for key in keys:
        values = {name: median(engines, name, key) for name in engines}
        known = {name: value for name, value in values.items() if value}
        mine = {name: known.pop(name) for name in list(known) if name.startswith("effinfer")}
        if mine and known:
            cells.append((key, mine, known))
    return cells


def operator_rows(result: Json) -> Iterator[Row]:
    best = [(k, max(mine.values()), *max((v, n) for n, v in others.items()))
            for k, mine, others in operator_cells(result, "matmul")]  # fmt: skip
    if best:
        ahead = sum(mine > other for _, mine, other, _ in best)
        key, mine, other, name = min(best, key=lambda cell: cell[1] / cell[2])
        yield Row(
            f"matmul 4096x4096, the better of our arithmetics: {ahead} of {len(best)} cells ahead "
            f"of every peer; worst: {key}",
            f"{mine:.0f} GOP/s", f"{name} {other:.0f}", mine / other, 1,
            "n = 1: memory; else arithmetic",
        )  # fmt: skip
    fast = [mine for key, mine, _, _ in best if key.endswith("n=128")]
    if fast and "amx" in result["effinfer"]["isa"]:
        least = min(fast)
        yield Row("matmul 4096x4096 at n = 128 (AMX), slowest type", f"{least:.0f} GOP/s",
                  "1000 GOP/s", least / 1000, 1)  # fmt: skip
    for key, mine, others in operator_cells(result, "attention"):
        other, name = min((value, name) for name, value in others.items())
        own = mine["effinfer"]
        least = goal(result, *{"n=8": (1.5, 2.3), "n=128": (1.2, 1.4)}.get(key, (1, 1)))
        yield Row(
            f"attention 20/5 x 128, 4096 KV, {key}", f"{1e6 * own:.0f} us",
            f"{name} {1e6 * other:.0f} us", other / own, least,
        )  # fmt: skip
    yield from library_rows(result)
    for key, mine, others in operator_cells(result, "sampling"):
        own, other = mine["effinfer"], others["torch"]
        yield Row(
            f"sampling of 128k tokens, {key}", f"{1e6 * own:.0f} us",
            f"torch, sorting {1e6 * other:.0f} us", other / own, 10,
        )  # fmt: skip
