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
    # What is left: the metadata (a vocabulary of 262k pieces takes 6 MB) and single pages.
    assert resident_bytes(path().resolve()) < 0.1 * size
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
    assert growth < 128 << 20  # a slice of 64 MB, KV and scratch; all logits are 268 MB


def test_info_says_how_memory_is_used():
    facts = info()
    assert facts.huge_pages in ("always", "madvise", "never", "unavailable")
    assert facts.numa_nodes >= 1
    assert "huge pages" in str(facts)
