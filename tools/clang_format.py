"""Formats every C++ and CUDA file, or with --check says which ones are not formatted."""

import subprocess
import sys
from pathlib import Path

from source_files import ROOT, source_files


def main() -> None:
    files = [str(path) for path in source_files("*.cpp", "*.h", "*.cu", "*.cuh")]
    tool = str(Path(sys.executable).with_name("clang-format"))
    mode = ["--dry-run", "--Werror"] if "--check" in sys.argv[1:] else ["-i"]
    sys.exit(subprocess.run([tool, *mode, *files], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
