"""The report writer of bench/, from a canned result."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import draft_models  # noqa: E402
import goals  # noqa: E402
import operators  # noqa: E402
import peers  # noqa: E402
import plots  # noqa: E402
import report  # noqa: E402
import serving  # noqa: E402
import speculation  # noqa: E402
import store  # noqa: E402
from sections import SECTIONS  # noqa: E402


def around(median: float) -> dict[str, float]:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median}


def engine(decode: float, prefill: float, **more: Any) -> dict[str, Any]:
    return {"decode_tok_s": around(decode), "prefill_tok_s": around(prefill), **more}


def model(name: str, **engines: Any) -> dict[str, Any]:
    return {
        "file": name,
        "file_bytes": 100_000_000,
        "weight_bytes": 100_000_000,
        "kv_token_bytes": 25_000,
        "engines": engines,
    }


def points(**values: float) -> dict[str, Any]:
    return {key.strip("_"): around(value) for key, value in values.items()}


def drafts(ratio: float, share: float | None = None) -> dict[str, Any]:
    return {
        "ratio": around(ratio),
        "tok_s": around(100 * ratio),
        "tokens_a_step": 4.0,
        "rows_a_step": 6.0,
        "accepted": 0.6,
        "predicted": around(ratio / share) if share else None,
        "share": around(share) if share else None,
    }


def drafted(goal: float, peer: dict[str, Any] | None = None, **found: Any) -> dict[str, Any]:
    return {
        "goal": goal,
        "distinct": around(0.8),
        "texts": 6,
        "plain_tok_s": around(100),
        "drafts": found,
        "llama.cpp": peer or {},
    }


def draft_model(goal: float, found: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"goal": goal, "against": "plain", "before": around(100), **found, **more}


LOOKUP = {
    "0": {"tok_s": around(50), "ratio": around(6)},
    "10": {"tok_s": around(60), "ratio": around(5)},
    "2": {"tok_s": around(80), "ratio": around(3.9)},
}
OWN = {"engine": {"version": "1"}, "peak_rss_bytes": 120_000_000}
RESULT: dict[str, Any] = {
    "machine": {
        "cpu": "A CPU (family 1, model 2)",
        "cores": 2,
        "threads": 2,
        "load_average": 0.0,
        "read_bytes_per_s": 30e9,
        "read_bytes_per_s_1_thread": 15e9,
    },
    "effinfer": {"version": "1", "isa": "avx512"},
    "prefill_tokens": 512,
    "decode_tokens": 128,
    "repeats": 5,
    "missing_peers": {"openvino": "not installed: no network"},
    "models": [
        model(
            "SmolLM2.gguf",
            **{
                "effinfer": engine(240, 1000, **OWN),
                "effinfer, avx2": engine(150, 700),
                "llama.cpp": engine(100, 500, engine={"version": "2"}),
                "llama.cpp, avx2": engine(100, 500),
            },
        ),
        model("gemma.gguf", effinfer={"error": "it broke"}),
    ],
    "sections": {
        "context": {
            "depths": [128, 4096],
            "engines": {
                "effinfer": points(_128=200, _4096=150),
                "llama.cpp": points(_128=100, _4096=50),
            },
        },
        "batch": {
            "requests": [1, 8],
            "engines": {"effinfer": points(_1=100, _8=300), "llama.cpp": {"error": "no"}},
        },
        "verify": {
            "tokens": [1, 8],
            "engines": {
                "effinfer": points(_1=0.004, _8=0.006),
                "llama.cpp": points(_1=0.009, _8=0.03),
            },
        },
        "threads": {
            "engines": {
                "effinfer, 1 thread": points(decode=100, prefill=100),
                "effinfer, 2 threads": points(decode=180, prefill=180),
            }
        },
        "lengths": {"prompts": [512], "engines": {"effinfer": points(_512=1000)}},
        "bitnet": {"engines": {"effinfer": points(decode=36, memory=40, prefill=1000)}},
        "large": {
            "engines": {
                "effinfer": points(decode=9, memory=10, prefill=100),
                "llama.cpp": points(decode=6, memory=10, prefill=50),
            }
        },
        "speculation": {
            "rows": {
                "S, code edit, replayed": drafted(1.7, LOOKUP, auto=drafts(3.0, 0.95)),
                "S, summary, replayed": drafted(1.2, auto=drafts(1.3, 0.85)),
                "S, nothing to hit, generated": drafted(0.98, ngram=drafts(0.99), auto=drafts(0.9)),
            },
            "eight": {"S": {"tree": around(1.05), "bookkeeping": around(0.04)}},
        },
        "draft_models": {
            "rows": {
                "T, answers, small": draft_model(2.3, drafts(2.0)),
                "T, answers, beside": draft_model(0.95, drafts(1.0), overlapped=around(0.9)),
                "T, answers, fewer layers": draft_model(1.0, drafts(1.2, 0.85), share_goal=0.9),
            },
            "first_token": {"ratio": around(1.1), "plain": around(0.2), "small": around(0.22)},
        },
        "serving": {
            "streams": [1, 8, 64],
            "engines": {
                "LLM.generate": points(_1=100, _8=200, _64=400, first=0.02),
                "effinfer serve": points(_1=98, _8=184, _64=380, first=0.025),
            },
            "schemas": {
                "LLM.generate": {
                    "free 1": around(100),
                    "schema 1": around(95),
                    "free 8": around(200),
                    "schema 8": around(160),
                }
            },
            "peers": {
                "effinfer serve": points(_8=180),
                "llama.cpp's server": points(_8=20),
                "another server": {"error": "no such module"},
            },
        },
        "matmul": {
            "engines": {
                "effinfer": {
                    "Q4_0, n=1": around(100),
                    "Q4_0, n=128": around(300),
                    "peak_rss_bytes": 1,
                },
                "llama.cpp": {"Q4_0, n=1": around(50), "Q4_0, n=128": around(400)},
                "llama.cpp, plain": {"Q4_0, n=1": {"error": "none"}},
            }
        },
        "ternary": {
            "engines": {
                "effinfer, t2": {"n=1": around(1e-4)},
                "llama.cpp, TQ2_0": {"n=1": around(3e-4)},
            }
        },
        "attention": {
            "engines": {
                "effinfer": {"n=1": around(1e-3)},
                "effinfer, i8 KV": {"n=1": around(5e-4)},
                "torch": {"n=1": around(2e-3)},
            }
        },
        "sampling": {
            "engines": {"effinfer": {"flat": around(1e-4)}, "torch": {"flat": around(2e-3)}}
        },
        "library": {
            "engines": {
                "effinfer": {
                    "prefill, f32": around(1e-3),
                    "decode, 16 x 4,096, own pages, f32": around(6e-3),
                    "decode, 16 x 4,096, one prefix, f32": around(1e-3),
                    "4,096 x 4,096, dense, f32": around(0.64),
                    "4,096 x 4,096, 6 of 64 blocks, f32": around(0.09),
                },
                "torch": {"prefill, f32": around(3e-3)},
            }
        },
    },
}


def summary() -> dict[str, list[str]]:
    return {row[0]: row for row in goals.rows(RESULT)}


@pytest.mark.parametrize(
    "what, ratio, met",
    [
        ("SmolLM2 Q4_1 decode", "2.40x", "yes"),
        ("SmolLM2 Q4_1 decode, share of the memory bound", "80%", "yes"),
        ("avx512: decode", "2.40x", "yes"),
        ("avx512: prefill", "2.00x", "no"),
        ("avx2: decode", "1.50x", "yes"),
        ("avx2: prefill", "1.40x", "yes"),
        ("decode at 4096 tokens of context, bf16 KV", "3.00x", "yes"),
        ("8 requests decoding together against one", "3.00x", "no"),
        ("BitNet 2B4T decode, share of the memory bound", "90%", "yes"),
        ("verifying 8 tokens in one step against one token", "1.50x", "yes"),
        ("decode: 2 threads against 1", "1.80x", "yes"),
        ("prefill: 2 threads against 1", "1.80x", "no"),
        (
            "matmul 4096x4096, the better of our arithmetics: 1 of 2 cells ahead of every peer; "
            "worst: Q4_0, n=128",
            "0.75x",
            "no",
        ),
        ("attention 20/5 x 128, 4096 KV, n=1", "2.00x", "yes"),
        ("sampling of 128k tokens, flat", "20.00x", "yes"),
        ("ops, prefill, f32", "3.00x", "yes"),
        ("a step of 8 tokens of one sequence", "5.00x", "no"),
        ("time of a step with more rows: least growth, 1 to 8", "1.50x", "yes"),
        ("8B shape, Q4_K: decode", "1.50x", "yes"),
        ("8B shape, Q4_K: prefill of 512", "2.00x", "no"),
        ("8B shape, Q4_K: decode, share of the memory bound", "90%", "yes"),
        ("ops, 16 requests on one prefix of 4,096, f32", "6.00x", "yes"),
        ("ops, 6 of 64 blocks of 4,096 x 4,096, f32", "1.50x", "no"),
        ("drafts: S, code edit, replayed: auto", "3.00x", "yes"),
        ("drafts: S, code edit, replayed", "3.90x", "no"),
        ("drafts: S, nothing to hit, generated, the worst of 2 proposers: auto", "0.90x", "no"),
        (
            "drafts: gain against what acceptance and rows' times predict, the least of 2: "
            "S, summary, replayed, auto",
            "85%",
            "no",
        ),
        ("drafts: S, a tree of 8 rows against a chain", "1.05x", "yes"),
        ("drafts: S, bookkeeping of 8 rows, share of a plain step", "4%", "no"),
        ("drafts: T, answers, small", "2.00x", "no"),
        ("drafts: T, answers, beside", "1.00x", "yes"),
        ("drafts: T, answers, beside: share of drafting beside steps of the target", "90%", "yes"),
        (
            "drafts: T, answers, fewer layers: gain against what acceptance and costs predict",
            "85%",
            "no",
        ),
        ("drafts: T, time to the first token with a draft model", "1.10x", "no"),
        ("served: 1 stream, against LLM.generate", "0.98x", "yes"),
        ("served: 8 streams, against LLM.generate", "0.92x", "no"),
        ("served: 64 streams, against LLM.generate", "0.95x", "yes"),
        ("served: what HTTP adds to the time to the first token", "0.50x", "yes"),
        ("1 request under a JSON schema, against free text", "0.95x", "yes"),
        ("8 requests, each under another JSON schema, against free text", "0.80x", "no"),
        ("served: 8 streams", "9.00x", "yes"),
        ("peak memory, SmolLM2.gguf", "0.87x", "yes"),
    ],
)
def test_goal(what: str, ratio: str, met: str) -> None:
    row = summary()[what]
    assert row[3] == ratio
    assert row[5] == met


def test_goals_without_amx() -> None:
    assert summary()["SmolLM2 Q4_1 prefill (AMX)"][5] == goals.NO_AMX


def test_goals_with_amx() -> None:
    result = copy.deepcopy(RESULT)
    result["effinfer"]["isa"] = "amx"
    rows = {row[0]: row for row in goals.rows(result)}
    assert rows["SmolLM2 Q4_1 prefill (AMX)"][3:6] == ["2.00x", ">= 8.00x", "no"]
    assert rows["matmul 4096x4096 at n = 128 (AMX), slowest type"][3] == "0.30x"
    assert goals.NO_AMX not in str(rows)


def test_goals_where_avx2_is_all_there_is() -> None:
    """llama.cpp is built once there, and the best level is avx2."""
    result = copy.deepcopy(RESULT)
    result["effinfer"]["isa"] = "avx2"
    engines = result["models"][0]["engines"]
    del engines["effinfer, avx2"], engines["llama.cpp, avx2"]
    names = [row[0] for row in goals.rows(result)]
    assert len(names) == len(set(names))
    rows = {row[0]: row for row in goals.rows(result)}
    assert rows["avx2: decode"][1:4] == ["240.0 tok/s", "llama.cpp 100.0", "2.40x"]
    assert "avx512: decode" not in rows


def test_bound_of_decoding_at_depth_reads_keys_and_values() -> None:
    row = summary()["decode at 4096 tokens of context, bf16 KV"]
    assert row[6] == "memory: 148 tok/s"  # 30e9 / (100e6 + 4096 * 25e3)


def test_every_section_has_text_and_a_place_in_the_document() -> None:
    parts = report.sections(RESULT)
    modules = (serving, speculation, draft_models, operators)
    assert set(SECTIONS).union(*(module.SECTIONS for module in modules)) <= set(parts)
    text = report.DOCUMENT.read_text()
    for name in [*parts, "fidelity"]:
        assert f"<!-- {name} -->\n" in text
        assert f"<!-- /{name} -->" in text


def test_the_page_is_of_the_machine_with_the_most_sections(tmp_path: Path) -> None:
    less = copy.deepcopy(RESULT)
    less["machine"]["cpu"] = "Another CPU"
    del less["sections"]["large"]
    for name, result in (("a", less), ("b", RESULT)):
        store.save(tmp_path / f"{name}.json", result)
    first, *others = store.by_coverage(tmp_path)
    assert first["machine"]["cpu"] == RESULT["machine"]["cpu"]
    parts = report.sections(first, others)
    assert parts["others"].startswith("### Another CPU")
    assert "SmolLM2 Q4_1 decode" in parts["others"]


def test_tables() -> None:
    parts = report.sections(RESULT)
    assert (
        "| effinfer | **200.0** (180.0 to 220.0) | **150.0** (135.0 to 165.0) |"
        in (parts["context"])
    )
    assert "![Decode against context](plots/decode_context.png)" in parts["context"]
    assert "llama.cpp: no" in parts["batch"]
    assert "| effinfer | **4.00** (3.60 to 4.40) | **6.00**" in parts["verify"]
    assert "| Q4_0, n=1 | 100 | 50 | - |" in parts["matmul"]
    assert "| n=1 | 100 | 300 |" in parts["ternary"]
    assert "| 100 us | 140 us | 0.71x | <= 1.00x | yes |" in parts["goals"]
    assert "| 100 us | llama.cpp, TQ2_0 300 us | 3.00x | >= 1.00x | yes |" in parts["goals"]
    assert "| **36.0** (32.4 to 39.6) | **40.0**" in parts["bitnet"]
    assert "| n=1 | 1000 | 500 | 2000 |" in parts["attention"]
    assert "| flat | 100 | 2000 |" in parts["sampling"]
    assert "| S, code edit, replayed | auto | 100.0 | 300.0 | **3.00**" in parts["speculation"]
    assert "3.16x; 95% | 72% to 88% of 6 |" in parts["speculation"]
    assert "| S, code edit, replayed | prompt lookup of 2 | **80.0**" in parts["speculation"]
    assert "| S | **1.050** (0.945 to 1.155) | **4.0** (3.6 to 4.4) |" in parts["speculation"]
    assert "| T, answers, fewer layers | plain | 100.0 | 120.0 | **1.20**" in parts["draft_models"]
    assert "| 60% | 1.41x; 85% |" in parts["draft_models"]
    assert "| effinfer serve | **98.0** (88.2 to 107.8) |" in parts["serving"]
    assert "| llama.cpp's server | - | **20.0** (18.0 to 22.0) | - | - |" in parts["serving"]
    assert "another server: no such module" in parts["serving"]
    assert "openvino: not installed: no network" in parts["speed"]
    assert "effinfer did not run this file: it broke" in parts["speed"]


def test_writing_keeps_what_was_not_measured(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    parts = ["machine", "speed", "goals", "others", "fidelity", *RESULT["sections"]]
    document.write_text(
        "".join(f"<!-- {part} -->\nold {part}\n<!-- /{part} -->\n" for part in parts)
    )
    report.write(RESULT, document=document)
    text = document.read_text()
    assert "old fidelity" in text
    assert "old context" not in text
    report.write(RESULT, document=document)
    assert document.read_text() == text


def test_store_keeps_the_other_sections_and_files(tmp_path: Path) -> None:
    path = store.path_of(RESULT["machine"], tmp_path)
    assert path.name == "a-cpu-family-1-model-2-2-threads.json"
    assert store.load(path) == {"models": [], "sections": {}}
    store.save(path, RESULT)
    known = store.load(path)
    store.put_model(known, {"file": "SmolLM2.gguf", "fidelity": [1]})
    store.put_model(known, {"file": "other.gguf"})
    assert [m["file"] for m in known["models"]] == ["SmolLM2.gguf", "gemma.gguf", "other.gguf"]
    assert known["models"][0]["engines"] == RESULT["models"][0]["engines"]


def test_plots(tmp_path: Path) -> None:
    names = plots.draw(RESULT, tmp_path)
    assert names == ["decode_context.png", "throughput_batch.png", "prefill_length.png"]
    assert all((tmp_path / name).read_bytes()[1:4] == b"PNG" for name in names)


def test_llama_cpp_is_built_for_what_was_asked_and_is_there() -> None:
    flags = {"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
    arguments = peers.llama_cpp_cmake_args(frozenset(peers.INSTRUCTION_SETS), flags)
    assert "-DGGML_AVX512=ON" in arguments
    assert "-DGGML_AVX512_VNNI=OFF" in arguments
    assert "-DGGML_AVX512=OFF" in peers.llama_cpp_cmake_args(peers.AVX2, flags)
    assert "-DGGML_NATIVE=OFF" in arguments
    assert "-DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF" in arguments


def test_llama_cpp_has_amx_where_a_compiler_for_it_is_installed(monkeypatch) -> None:
    flags = {"avx2", "fma", "amx_tile", "amx_int8", "amx_bf16"}
    monkeypatch.setattr(peers, "cpu_flags", lambda: flags)
    monkeypatch.setattr(peers, "clang", lambda: "clang-19")
    options = peers.build_options(peers.LLAMA_CPP)
    assert "-DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON" in options["CMAKE_ARGS"]
    assert (options["CC"], options["CXX"]) == ("clang-19", "clang++-19")
    assert "CC" not in peers.build_options(peers.LLAMA_CPP_AVX2)
    assert "-DGGML_AMX_TILE=OFF" in peers.build_options(peers.LLAMA_CPP_AVX2)["CMAKE_ARGS"]
    monkeypatch.setattr(peers, "clang", lambda: None)
    options = peers.build_options(peers.LLAMA_CPP)
    assert "CC" not in options and "-DGGML_AMX_TILE=OFF" in options["CMAKE_ARGS"]
    monkeypatch.setattr(peers, "clang", lambda: "clang-19")
    monkeypatch.setattr(peers, "cpu_flags", lambda: flags - {"amx_bf16"})
    assert "CC" not in peers.build_options(peers.LLAMA_CPP)


@pytest.mark.parametrize(("version", "found"), [("19.1.7", True), ("14.0.6", False), ("", False)])
def test_a_clang_that_builds_amx_is_new_enough(monkeypatch, version, found) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda name: name)
    monkeypatch.setattr(
        peers.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=version + "\n")
    )
    assert (peers.clang() is not None) == found
    monkeypatch.setattr(peers.shutil, "which", lambda _: None)
    assert peers.clang() is None


def test_llama_cpp_is_not_built_twice_alike(monkeypatch) -> None:
    flags = {"avx2", "fma", "f16c", "bmi2"}
    monkeypatch.setattr(peers, "cpu_flags", lambda: flags)
    with pytest.raises(peers.PeerUnavailable, match="llama.cpp is the same build on this CPU"):
        peers.ensure(peers.LLAMA_CPP_AVX2)
    flags |= {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    assert peers.build_options(peers.LLAMA_CPP) != peers.build_options(peers.LLAMA_CPP_AVX2)
