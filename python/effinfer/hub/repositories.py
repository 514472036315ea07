"""Models of the Hugging Face hub: huggingface_hub fetches them and keeps its own cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from effinfer import _core
from effinfer.hub.reports import Progress
from effinfer.hub.repository_files import choose
from effinfer.hub.repository_name import Name

_TIMEOUT_SECONDS = 5.0


def fetch(name: Name, report: Progress) -> Path:
    """The file or folder, from the hub's cache or the hub. Throws UnsupportedError without
    huggingface_hub, FileError (no such repository or file, not reachable)."""
    hub = _library(name)
    try:
        sizes = _listing(hub, name.repo)
    except Exception as error:
        return _cached(hub, name, error)
    wanted = choose(name, list(sizes))
    reporter = _Reporter(f"download {name.repo}", sum(sizes[file] for file in wanted), report)
    try:
        paths = [
            Path(
                hub.hf_hub_download(
                    repo_id=name.repo,
                    filename=file,
                    etag_timeout=_TIMEOUT_SECONDS,
                    tqdm_class=reporter.bar,
                )
            )
            for file in wanted
        ]
    except Exception as error:
        raise _core.FileError(f"[load] {name}: {_first_line(error)}") from None
    return paths[0] if wanted[0].endswith(".gguf") else paths[0].parent


def _library(name: Name) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        path = "no such file or folder; to fetch it from the hub: " if name.bare else "needs "
        raise _core.UnsupportedError(f"[load] {name}: {path}pip install 'effinfer[hub]'") from None
    return huggingface_hub


def _listing(hub: Any, repo: str) -> dict[str, int]:
    """The repository's files and their bytes, asked once: a hub that is not reachable shows within
    seconds."""
    info = hub.HfApi().model_info(repo, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    return {file.rfilename: file.size or 0 for file in info.siblings or []}


def _cached(hub: Any, name: Name, error: Exception) -> Path:
    """What an earlier download left; otherwise the error of this one."""
    refused = getattr(getattr(error, "response", None), "status_code", None)
    if refused is None:
        try:
            folder = Path(hub.snapshot_download(name.repo, local_files_only=True))
            files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            first = choose(name, files)[0]
            return folder / first if first.endswith(".gguf") else folder
        except Exception:  # it says less than the first
            pass
    what = "no such file or folder, and on the hub: " if name.bare else ""
    advice = (
        ""
        if refused
        else "; the hub cannot be reached, and its cache has no such model (HF_HUB_OFFLINE=1 asks "
        "the cache alone)"
    )
    raise _core.FileError(f"[load] {name}: {what}{_first_line(error)}{advice}") from None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class _Reporter:
    """Adds the bars of several files up to one."""

    def __init__(self, what: str, total: int, report: Progress) -> None:
        self._what, self._total, self._report = what, total, report
        self._done = 0

    def bar(self, *_: Any, **options: Any) -> "_Bar":
        return _Bar(self._add, options.get("initial") or 0)

    def _add(self, count: int) -> None:
        self._done += count
        if self._total:
            self._report(self._what, min(self._done, self._total), self._total)


class _Bar:
    """What huggingface_hub wants of a tqdm bar."""

    def __init__(self, add: Callable[[int], None], initial: int) -> None:
        self._add = add
        self.n = initial
        self.total = 0
        add(initial)

    def update(self, count: float = 1) -> None:
        self.n += int(count)
        self._add(int(count))

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def cached() -> list[tuple[str, Path, int]]:
    """(org/repo, folder, bytes) of the models in the hub's cache; none without huggingface_hub."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        (repo.repo_id, Path(repo.repo_path), repo.size_on_disk)
        for repo in repos
        if repo.repo_type == "model"
    )


def remove(name: Name) -> int:
    """Deletes a repository from the hub's cache; returns the bytes that this freed. Throws
    FileError when it is not there."""
    hub = _library(name)
    if name.file or name.tag:
        raise _core.InvalidArgumentError(f"[remove] {name}: expected the whole repository")
    if name.repo not in [repo for repo, _, _ in cached()]:
        raise _core.FileError(f"[remove] {name}: not in the hub's cache")
    info = hub.scan_cache_dir()
    (found,) = [r for r in info.repos if r.repo_type == "model" and r.repo_id == name.repo]
    strategy = info.delete_revisions(*(revision.commit_hash for revision in found.revisions))
    strategy.execute()
    return int(strategy.expected_freed_size)
