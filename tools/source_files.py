"""The files of the repository: tracked ones and new ones that git does not ignore."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def source_files(*patterns: str) -> list[Path]:
    """Paths relative to the root that match the git patterns (all files without one)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines() if (ROOT / line).is_file()]
