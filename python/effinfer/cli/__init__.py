"""The command line: `effinfer`.

Text and results go to stdout, statistics and progress to stderr. Exit codes: 0 done, 1 an error
while running, 2 wrong usage, 130 interrupted.
"""

import sys


def main() -> None:
    """Runs the command line of this process; an error is one line on stderr."""
    from effinfer import _core
    from effinfer.cli.app import app

    try:
        app()
    except _core.InvalidArgumentError as error:
        sys.exit(_report(error, 2))
    except (_core.Error, OSError) as error:
        sys.exit(_report(error, 1))


def _report(error: Exception, code: int) -> int:
    line = " ".join(str(error).split())
    print(f"effinfer: error: {line}", file=sys.stderr)
    return code
