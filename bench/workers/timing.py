"""The median time of a call, for workers of single operators."""

import statistics
import time
from collections.abc import Callable


def median_seconds(call: Callable[[], object], seconds: float) -> float:
    """Of the calls that fit into `seconds`, at least one, after an unmeasured one."""
    call()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while not times or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
