"""What a loaded model holds of its files: packed weights, and next to nothing of the mapping."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from effinfer import LLM, _core, info
from effinfer.graph import GraphBuilder
from tests.model_files import gemma3_path, smollm2_path

ROWS, COLS = 4096, 1024


def resident_bytes(path: Path) -> int:
    """Memory that this process holds of the mappings of a file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and fields[0] == "Rss:":
            total += 1024 * int(fields[1])
    return total


@pytest.mark.parametrize("path", [smollm2_path, gemma3_path])
def test_a_packed_model_leaves_its_file(path):
    llm = LLM(path().resolve(), max_seq_len=64)
    size = path().stat().st_size
    assert llm.engine.packed_bytes > 0.9 * size
    # What is left: single pages. The page cache may hold a file in pieces of up to 2 MB, as the
    # kernel chooses, and a fault for one number maps a whole piece: two for what was read of the
    # metadata, which may lie in both, one for the last tensor.
    assert resident_bytes(path().resolve()) < 3 * 2**21
    before = llm.logits([1, 2, 3])
    np.testing.assert_array_equal(before, llm.logits([1, 2, 3]))


def compile_matrix(array: np.ndarray, path: Path | None = None) -> _core.Executable:
    g = GraphBuilder("head")
    weights = _core.MemoryWeights()
    weights.add("table", array, "f32", [ROWS, COLS], path=path)
    table = g.weight("table", "f32", [ROWS, COLS])
    x = g.embedding(g.input("token_ids", "i32", ["T"]), table)
    x = g.select_rows(x, g.input("logit_rows", "i32", ["R"]))
    options = _core.CompileOptions(max_seq_len=64, precision="f32")
    return _core.compile(g.finish(g.linear(x, table)), weights, _core.ThreadPool(2), options)


def test_only_mapped_arrays_are_dropped(tmp_path):
    values = np.random.default_rng(3).standard_normal((ROWS, COLS)).astype(np.float32)
    path = tmp_path / "table.bin"
    values.tofile(path)
    mapped = np.memmap(path, np.float32, "r", shape=(ROWS, COLS))
    np.testing.assert_array_equal(mapped, values)
    assert resident_bytes(path) == values.nbytes
    compile_matrix(mapped)
    assert resident_bytes(path) == values.nbytes
    compile_matrix(mapped, path)
    assert resident_bytes(path) == 0
    np.testing.assert_array_equal(mapped, values)  # they come back from the file
    copy = values.copy()
    compile_matrix(copy)
    np.testing.assert_array_equal(copy, values)


PEAK = """
import os, sys
import effinfer


def status(name):
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


# Read again, the file lies in the page cache in the largest pieces that there are.
with open(sys.argv[1], "rb") as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
effinfer.LLM  # imports what it needs
before = status("VmRSS:")
llm = effinfer.LLM(sys.argv[1], threads=2, max_seq_len=1024)
params = effinfer.SamplingParams(temperature=0.0, max_tokens=8)
llm.engine.add(list(range(100, 612)), params.to_core())
while llm.engine.has_work():
    llm.engine.step()
assert "numpy" not in sys.modules  # 12 MB, of use for arrays and tokenizers only
print(status("VmHWM:") - before)
"""


# Packed weights, keys and values of 512 tokens and the arena are 114 and 265 MB of it.
@pytest.mark.parametrize("path,limit", [(smollm2_path, 126e6), (gemma3_path, 280e6)])
def test_the_peak_is_that_of_a_model_that_runs(path, limit):
    command = [sys.executable, "-c", PEAK, str(path())]
    growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert growth < limit


SCORE = """
import resource, sys
import effinfer
llm = effinfer.LLM(sys.argv[1], max_seq_len=256, prefix_cache=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
llm.log_likelihoods([2, *range(1000, 1255)])
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def test_scoring_holds_a_slice_of_the_logits():
    command = [sys.executable, "-c", SCORE, str(gemma3_path())]
    growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert growth < 96 << 20  # a slice of 64 MB, KV and scratch; all logits are 268 MB


def test_info_says_how_memory_is_used():
    facts = info()
    assert facts.huge_pages in ("always", "madvise", "never", "unavailable")
    assert facts.numa_nodes >= 1
    assert facts.devices == ("cpu",)
    assert "devices    cpu" in str(facts)
    assert "huge pages" in str(facts)
