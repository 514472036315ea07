"""Fills the virtual environment that it runs in; called by the Makefile.

setup_venv.py build test ...                 installs requirement groups, each once
setup_venv.py package --build-dir DIR ...    builds and installs effinfer, incrementally
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, whose pip still carries the parser
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
STAMPS = Path(sys.prefix) / "effinfer-stamps"
TREES = ("csrc", "cmake", "python", "tests/cpp", "tests/gpu", "bench/gpu")


def requirements(group: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if group == "build":
        return [*project["build-system"]["requires"], "cmake>=3.24", "ninja"]
    if group == "run":
        return list(project["project"]["dependencies"])
    return list(project["project"]["optional-dependencies"][group])


def run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    # The environment's cmake and ninja serve the build.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    if "-v" not in arguments or os.environ.get("CI"):
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    else:
        status = run_build(command, environment)
    if status != 0:
        sys.exit(f"failed: {' '.join(command)}")


def run_build(command: list[str], environment: dict[str, str]) -> int:
    """Runs a verbose build that may take many minutes. Prints how far it is, by Ninja's count of
    steps, or all that it wrote where it fails."""
    written, tenths = [], 0
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, errors="replace", **pipes) as build:
        for line in build.stdout:
            written.append(line)
            step = re.match(r"\s*\[(\d+)/(\d+)\] ", line)
            done, steps = (int(step[1]), int(step[2])) if step else (0, 1)
            if steps >= 20 and 10 * done // steps > tenths:
                tenths = 10 * done // steps
                print(f"effinfer: {10 * tenths} % of its {steps} steps", flush=True)
    if build.returncode != 0:
        print("".join(written), end="", file=sys.stderr)
    return build.returncode


def once(name: str, key: str, action: list[str]) -> None:
    """Runs `pip install *action` unless the stamp `name` already holds `key`."""
    stamp = STAMPS / name
    if stamp.exists() and stamp.read_text() == key:
        return
    print(f"effinfer: installing {name} ...", flush=True)
    run_pip(*action)
    STAMPS.mkdir(exist_ok=True)
    stamp.write_text(key)


def source_digest(options: list[str]) -> str:
    digest = hashlib.sha256(" ".join(options).encode())
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    files += [ROOT / "tools" / name for name in ("nvcc_small_ptx.py", "ptx_registers.py")]
    for tree in TREES:
        files += [path for path in sorted((ROOT / tree).rglob("*")) if path.is_file()]
    for path in files:
        if path.suffix in {".so", ".pyc"}:
            continue
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install_package(build_dir: str, with_tests: bool) -> None:
    defines = {"EFFINFER_TESTS": "ON" if with_tests else "OFF", "EFFINFER_UNITY": "ON"}
    defines["EFFINFER_CUDA_SMALL"] = "OFF"  # takes time, and is for who installs it
    if os.environ.get("CI"):
        defines["EFFINFER_WERROR"] = "ON"
    if shutil.which("ccache"):
        defines["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
    # The long option: pip below 23.1, which Debian 12 ships, has no -C.
    settings = [f"build-dir={build_dir}", *(f"cmake.define.{k}={v}" for k, v in defines.items())]
    options = ["--no-build-isolation", *(f"--config-settings={setting}" for setting in settings)]
    once("package", source_digest(options), [*options, "-v", "."])


def main() -> None:
    if sys.prefix == sys.base_prefix:
        sys.exit("setup_venv.py: run it with the python of a virtual environment")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="+", help="build, test, lint; or: package")
    parser.add_argument("--build-dir", default="build/wheel")
    parser.add_argument("--with-tests", action="store_true")
    arguments = parser.parse_args()
    for group in arguments.groups:
        if group == "package":
            install_package(arguments.build_dir, arguments.with_tests)
        else:
            wanted = requirements(group)
            once(group, "\n".join(wanted), ["-q", *wanted])


if __name__ == "__main__":
    main()
