"""nvcc_small_ptx.py NVCC ARGUMENTS...: runs nvcc, whose objects get smaller PTX (ptx_registers.py).

nvcc has no hook between its steps, but names them (--dryrun). Here they run one by one, in a folder
of their own, and PTX is rewritten before fatbinary packs it. Machine code is made of what nvcc
wrote.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ptx_registers import reuse_registers

STEP = "#$ "
SETTING = re.compile(r"(\w+)=(.*)")
PTX_IMAGE = re.compile(r"kind=ptx,[^\"]*file=([^\",]+)")
# A step that nvcc takes itself: the files that preprocessors have read become a rule of make.
DEPENDENCIES = re.compile(r"-- Filter Dependencies -- > \"?([^\"]+?)\"? *")
LINE_MARKER = re.compile(r"^# \d+ \"([^\"<]+)\"", re.MULTILINE)


def compile_in_steps(command: list[str], folder: str) -> int:
    environment = {**os.environ, "TMPDIR": folder}
    plan = subprocess.run(
        [command[0], "--dryrun", *command[1:]], env=environment, capture_output=True, text=True
    )
    if plan.returncode != 0:
        sys.stderr.write(plan.stderr)
        return plan.returncode
    lines = plan.stderr.splitlines()
    if not any(line.startswith(STEP) for line in lines):
        print("nvcc_small_ptx.py: nvcc names no steps, so PTX stays as it is", file=sys.stderr)
        return subprocess.run(command).returncode
    rule_file = ""
    for line in lines:
        if not line.startswith(STEP):
            print(line, file=sys.stderr)  # a warning
            continue
        step = line.removeprefix(STEP)
        setting = SETTING.fullmatch(step)
        if setting:
            environment[setting[1]] = setting[2]
            continue
        dependencies = DEPENDENCIES.fullmatch(step)
        if dependencies:
            rule_file = dependencies[1]
            continue
        if step.startswith("rm "):  # the folder goes as a whole
            continue
        if step.startswith("fatbinary "):
            for path in map(Path, PTX_IMAGE.findall(step)):
                path.write_text(reuse_registers(path.read_text()))
        status = subprocess.run(step, shell=True, env=environment).returncode
        if status != 0:
            return status
    if rule_file:
        target = option(command, "-MT") or option(command, "-o")
        Path(rule_file).write_text(dependency_rule(target, Path(folder)))
    return 0


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1] if name in command else ""


def dependency_rule(target: str, folder: Path) -> str:
    """A rule of make: all files that went into the preprocessed ones of `folder`."""
    files = {
        name
        for path in folder.glob("*.ii")
        for name in LINE_MARKER.findall(path.read_text(errors="replace"))
        if not name.endswith("/")
    }
    return f"{target}: " + " \\\n ".join(name.replace(" ", "\\ ") for name in sorted(files)) + "\n"


def main() -> int:
    command = sys.argv[1:]
    if "-c" not in command:
        return subprocess.run(command).returncode
    with tempfile.TemporaryDirectory() as folder:
        return compile_in_steps(command, folder)


if __name__ == "__main__":
    sys.exit(main())
