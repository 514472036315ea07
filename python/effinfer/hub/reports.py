"""How far a download is."""

from collections.abc import Callable

# (what, bytes done, bytes in all); may raise to stop the download.
Progress = Callable[[str, int, int], None]


def ignore(what: str, done: int, total: int) -> None:
    """For callers who do not ask."""
