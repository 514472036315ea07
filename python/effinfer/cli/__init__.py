"""The command line: `effinfer`.

Text and results go to stdout, statistics, progress and errors to stderr. Exit codes: 0 done, 1 an
error while running, 2 wrong usage, 130 interrupted. With --json stdout gets one object however a
command ends, with "error" in it when it failed.
"""

import sys
from collections.abc import Sequence


def main() -> None:
    """Runs the command line of this process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs a command line; returns its exit code. An error is a line or two on stderr."""
    from effinfer.cli.app import app
    from effinfer.cli.endings import ending_of
    from effinfer.cli.messages import shown_messages
    from effinfer.cli.output import Told, objects_printed

    arguments = list(arguments) or ["--help"]
    before = objects_printed()
    with shown_messages():
        try:
            return app(arguments, prog_name="effinfer", standalone_mode=False) or 0
        except Told as told:
            return told.code
        except (Exception, KeyboardInterrupt) as error:
            ending = ending_of(error)
            # A Ctrl-C that comes after the result takes nothing back.
            is_late = ending.code == 130 and objects_printed() > before
            ending.tell(as_json="--json" in arguments and not is_late)
            return ending.code
