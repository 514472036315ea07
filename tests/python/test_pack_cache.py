"""The pack cache: hits, misses, damage, folders that cannot be written, several processes."""

import os
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import effinfer
from effinfer import LLM, _core
from effinfer.checkpoints.model_files import open_model
from tests.compiler.tiny_models import make_llama
from tests.reference import tiny

TOKENS = [256, *range(3, 60)]
HEADER_BYTES, DATA_ALIGNMENT = 128, 4096


@pytest.fixture(params=["gguf", "folder"])
def model(request, tmp_path) -> Path:
    config = tiny.FAMILIES["llama"]
    if request.param == "gguf":
        return tiny.write_gguf(config, tmp_path / "model.gguf")
    return tiny.write_folder(config, tmp_path / "model")


@pytest.fixture
def gguf(tmp_path) -> Path:
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path / "model.gguf")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "packed"


def load(model: Path, folder: Path | bool, expected: str) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLM(model, pack_cache=folder)
    assert llm.engine.pack_cache.state == expected, llm.engine.pack_cache.reason
    return llm


def packs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pack"))


def test_a_later_load_maps_what_an_earlier_one_packed(model, folder):
    plain = load(model, False, "off")
    stored = load(model, folder, "stored")
    assert [str(path) for path in packs(folder)] == [stored.engine.pack_cache.path]
    hit = load(model, folder, "hit")
    for llm in (stored, hit):
        for phase in ("prefill", "decode"):
            expected = plain.logits(TOKENS, phase=phase)
            np.testing.assert_array_equal(llm.logits(TOKENS, phase=phase), expected)
    assert f"pack cache: hit {packs(folder)[0]}" in hit.explain()
    assert "pack cache: stored" in stored.explain()
    assert not list(folder.glob("*.tmp*"))


def test_every_section_is_guarded(gguf, folder):
    plain = load(gguf, folder, "stored").logits(TOKENS)
    (path,) = packs(folder)
    whole = path.read_bytes()
    (table_bytes,) = struct.unpack_from("<Q", whole, 16)
    (data_begin,) = struct.unpack_from("<Q", whole, 40)
    assert data_begin % DATA_ALIGNMENT == 0
    header = [0, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 127]
    table = [HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + table_bytes - 1]
    data = [data_begin, (data_begin + len(whole)) // 2, len(whole) - 1]
    for offset in header + table + data:
        damaged = bytearray(whole)
        damaged[offset] ^= 0x10
        path.write_bytes(damaged)
        llm = load(gguf, folder, "stored")
        assert llm.engine.pack_cache.reason
        assert path.read_bytes() == whole
    np.testing.assert_array_equal(load(gguf, folder, "hit").logits(TOKENS), plain)
    for size in (0, 7, HEADER_BYTES, data_begin, len(whole) - 1):
        path.write_bytes(whole[:size])
        load(gguf, folder, "stored")
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0")
    load(gguf, folder, "stored")


def test_another_layout_version_is_built_anew(gguf, folder):
    load(gguf, folder, "stored")
    (path,) = packs(folder)
    whole = bytearray(path.read_bytes())
    struct.pack_into("<I", whole, 8, 99)
    path.write_bytes(whole)
    llm = load(gguf, folder, "stored")
    assert llm.engine.pack_cache.reason == "layout version 99"
    load(gguf, folder, "hit")


def test_older_versions_of_the_same_weights_are_removed(gguf, folder, tmp_path):
    path = Path(load(gguf, folder, "stored").engine.pack_cache.path)
    other = load(tiny.write_gguf(tiny.FAMILIES["qwen3"], tmp_path / "o.gguf"), folder, "stored")
    stem, version = path.stem.rsplit("-v", 1)
    other_stem = Path(other.engine.pack_cache.path).stem.rsplit("-v", 1)[0]
    kept = [
        folder / f"{stem}-v{int(version) + 1}.pack",  # of a newer program
        folder / f"{other_stem}-v0.pack",
        folder / f"{stem}-v0.pack.tmp.1.0",  # being written
        folder / f"{stem}-v0.old.pack",
        folder / f"{stem}-v.pack",
        folder / f"{stem}-v-1.pack",
        tmp_path / f"{stem}-v0.pack",
        Path(other.engine.pack_cache.path),
        path,
    ]
    stale = folder / f"{stem}-v0.pack"
    for file in [stale, *kept]:
        if not file.exists():
            file.write_bytes(b"EFFIPACK")
    load(gguf, folder, "hit")
    assert stale.exists()
    with stale.open("rb") as mapped:  # as a process does that still runs with it
        path.unlink()
        load(gguf, folder, "stored")
        assert not stale.exists()
        assert mapped.read() == b"EFFIPACK"
    assert [file for file in kept if not file.exists()] == []
    load(gguf, folder, "hit")


def test_a_stale_file_that_cannot_be_removed_stays(gguf, folder):
    path = Path(load(gguf, folder, "stored").engine.pack_cache.path)
    stale = folder / (path.stem.rsplit("-v", 1)[0] + "-v0.pack")
    stale.mkdir()
    (stale / "file").write_bytes(b"")
    path.unlink()
    load(gguf, folder, "stored")
    assert stale.exists()


def test_contents_name_the_file(gguf, folder, tmp_path):
    load(gguf, folder, "stored")
    copy = tmp_path / "copy.gguf"
    shutil.copy(gguf, copy)
    load(copy, folder, "hit")
    file = _core.GgufFile(str(gguf))
    weight = file.tensor_bytes("blk.0.attn_q.weight").tobytes()
    offset = gguf.read_bytes().index(weight)
    times = os.stat(gguf)
    with gguf.open("r+b") as handle:  # in place, same size, same times
        handle.seek(offset + 1)
        handle.write(bytes([weight[1] ^ 1]))
    os.utime(gguf, ns=(times.st_atime_ns, times.st_mtime_ns))
    plain = load(gguf, False, "off").logits(TOKENS)
    changed = load(gguf, folder, "stored")
    np.testing.assert_array_equal(changed.logits(TOKENS), plain)
    assert len(packs(folder)) == 2


def test_an_old_record_is_trusted_and_a_damaged_one_is_not(gguf, folder):
    load(gguf, folder, "stored")
    (record,) = folder.glob("*.file")
    text = record.read_text()
    record.write_text(text[:-1] + ("0" if text[-1] != "0" else "1"))
    load(gguf, folder, "hit")
    assert record.read_text().split()[:8] == text.split()[:8]


@pytest.mark.parametrize("name", ["file/below", "file"])
def test_a_folder_that_cannot_be_written_costs_only_the_cache(gguf, tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(effinfer.PackCacheWarning, match="pack_cache"):
        llm = LLM(gguf, pack_cache=tmp_path / name)
    assert llm.engine.pack_cache.state == "failed"
    plain = load(gguf, False, "off")
    np.testing.assert_array_equal(llm.logits(TOKENS), plain.logits(TOKENS))


FULL_DISK = """
import resource, signal, sys, warnings
import effinfer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    llm = effinfer.LLM(sys.argv[1], pack_cache=sys.argv[2])
assert llm.engine.pack_cache.state == "failed", llm.engine.pack_cache.state
assert [w.category for w in caught] == [effinfer.PackCacheWarning], caught
"""


def test_a_full_disk_leaves_nothing_behind(gguf, folder):
    subprocess.run([sys.executable, "-c", FULL_DISK, str(gguf), str(folder)], check=True)
    assert not packs(folder)
    assert not list(folder.glob("*.tmp*"))
    load(gguf, folder, "stored")


LOAD = """
import sys, effinfer
llm = effinfer.LLM(sys.argv[1], pack_cache=sys.argv[2])
print(llm.engine.pack_cache.state, llm.logits([5, 6, 7]).tobytes().hex())
"""


def test_two_processes_at_the_same_time(gguf, folder):
    command = [sys.executable, "-c", LOAD, str(gguf), str(folder)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert {state for state, _ in outputs} <= {"stored", "hit"}
    assert outputs[0][1] == outputs[1][1]
    load(gguf, folder, "hit")


def test_arrays_without_a_file_are_not_kept(folder):
    model = make_llama()
    options = _core.CompileOptions(max_seq_len=64, pack_cache=folder)
    executable = _core.compile(model.graph, model.source, _core.ThreadPool(1), options)
    assert executable.pack_cache.state == "failed"
    assert "mapped file" in executable.pack_cache.reason


def test_find_tells_what_a_load_would_do(gguf, folder):
    files = open_model(gguf)
    pool = _core.ThreadPool(1)

    def find() -> _core.PackCacheReport:
        return _core.find_pack_cache(files.graph, files.weights, folder, pool)

    assert find().state == "absent"
    assert not folder.exists()
    path = load(gguf, folder, "stored").engine.pack_cache.path
    assert (find().state, find().path) == ("hit", path)
    Path(path).write_bytes(b"EFFI")
    assert (find().state, find().reason) == ("absent", "truncated header")
