"""python -m effinfer: where the C++ library is, or the command line.

--cmake-dir prints the folder of effinferConfig.cmake, --include-dir that of the headers.
"""

import sys
from pathlib import Path

from effinfer import _core


def _installed(relative: str) -> Path:
    path = Path(_core.__file__).resolve().parent / relative
    if not path.is_dir():
        raise SystemExit(f"{path}: no such folder; this copy has no installed C++ library")
    return path


def main() -> None:
    places = {"--cmake-dir": "lib/cmake/effinfer", "--include-dir": "include"}
    if len(sys.argv) == 2 and sys.argv[1] in places:
        print(_installed(places[sys.argv[1]]))
        return
    from effinfer.cli import main as run_cli

    run_cli()


if __name__ == "__main__":
    main()
