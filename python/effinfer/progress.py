"""Progress bars on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from effinfer.hub import Progress


@contextmanager
def download_bar() -> Iterator[Progress]:
    """A bar a download or extraction, shown from its first report on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    tasks = {}
    with Bars(*columns, console=console) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield report
