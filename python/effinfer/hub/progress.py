"""Progress bars on stderr."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from effinfer import hub
from effinfer.hub.catalog import CATALOG


@contextmanager
def download_bar() -> Iterator[hub.Progress]:
    """A bar a download or extraction, shown from its first report on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    tasks = {}
    with Progress(*columns, console=Console(file=sys.stderr)) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield report


@contextmanager
def weights_bar() -> Iterator[Callable[[str, int, int], None]]:
    """One bar over the weights of a model, named after the tensor that was done last."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as bars:
        task = bars.add_task("")

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield report


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
    entry = CATALOG.get(name)
    if entry is None or hub.is_pulled(entry) or Path(name).exists():
        return hub.resolve(name)
    return pull_with_bar(name)
