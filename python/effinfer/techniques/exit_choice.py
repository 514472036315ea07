"""Which exit of a model drafts, and how many tokens: the most expected tokens a second."""

from collections.abc import Sequence


def best_exit(
    right: Sequence[float], seconds: Sequence[float], step_seconds: float, length: int
) -> tuple[int, int]:
    """(exit, depth), depth 0 for no draft. The last exit gives the first token of a draft, the
    chosen one the others.

    right: how often each exit says the token that comes; seconds: of a token of each, 0 where that
    is not known yet; step_seconds: of the step that verifies, 0 where that is not known.
    """
    last = len(right) - 1
    if not step_seconds:
        return last, length
    best = (1 / step_seconds, last, 0)
    for place, share in enumerate(right):
        expected, path = 1.0, right[last]
        for depth in range(1, length + 1):
            expected += path
            path *= share
            drafting = seconds[last] + (depth - 1) * seconds[place]
            best = max(best, (expected / (step_seconds + drafting), place, depth))
    return best[1:]


def blend(old: float, fresh: float) -> float:
    """A time that follows what was measured lately; 0 is none."""
    return 0.9 * old + 0.1 * fresh if old else fresh
