"""Progress bars on stderr: one a wait, from the first report on."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from effinfer import hub
from effinfer.hub.catalog import CATALOG
from effinfer.hub.repository_name import is_name


@contextmanager
def download_bar() -> Iterator[hub.Progress]:
    """Bytes and their rate."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with _bar(columns) as report:
        yield report


@contextmanager
def weights_bar() -> Iterator[hub.Progress]:
    """The share of a model's weights, with the name of the tensor that was done last."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with _bar(columns) as report:
        yield report


@contextmanager
def runs_bar() -> Iterator[hub.Progress]:
    """Parts of a measurement; only for a person, and gone when it is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with _bar(columns, transient=True) as report:
        yield report


@contextmanager
def _bar(columns: Any, *, transient: bool = False) -> Iterator[hub.Progress]:
    from rich.console import Console
    from rich.progress import Progress

    bars = Progress(*columns, console=Console(file=sys.stderr), transient=transient)
    task = bars.add_task("")

    def report(what: str, done: int, total: int) -> None:
        bars.start()  # does nothing when it runs
        bars.update(task, description=what, completed=done, total=total)

    try:
        yield report
    finally:
        if bars.live.is_started:
            bars.stop()


def pull_with_bar(name: str, *, force: bool = False) -> Path:
    """hub.pull(), telling on stderr what is fetched and under which terms."""
    entry = hub.find_entry(name)
    print(f"effinfer: pulling {name} ({entry.num_bytes / 1e6:.0f} MB)", file=sys.stderr)
    if entry.notice:
        print(entry.notice, file=sys.stderr)
    with download_bar() as progress:
        return hub.pull(name, progress=progress, force=force)


def resolve_with_bar(model: str | os.PathLike[str]) -> Path:
    """hub.resolve(), telling on stderr when something has to be fetched."""
    name = os.fspath(model)
    if os.path.exists(os.path.expanduser(name)):
        return hub.resolve(name)
    if name in CATALOG and not hub.is_pulled(CATALOG[name]):
        return pull_with_bar(name)
    if name not in CATALOG and is_name(name):
        with download_bar() as progress:
            return hub.resolve(name, progress=progress)
    return hub.resolve(name)
