"""What importing costs."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import effinfer
from effinfer import techniques

ROOT = Path(__file__).resolve().parents[2]

# Two light modules of the standard library are needed to import the rest on demand.
PROGRAM = """\
import importlib, sys, typing
before = set(sys.modules)
import effinfer
print(*sorted(set(sys.modules) - before))
"""


def test_import_loads_nothing_else():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["effinfer"]


def test_the_package_never_needs_torch():
    program = "import sys; sys.modules['torch'] = None; import effinfer.cli.app, effinfer.ops"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_name_of_the_techniques_is_there():
    assert [name for name in techniques.__all__ if not hasattr(techniques, name)] == []


@pytest.mark.parametrize("name", effinfer.__all__)
def test_every_public_name_resolves(name):
    assert getattr(effinfer, name) is not None
    assert name in dir(effinfer)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = effinfer.nothing


def test_the_version_has_one_source():
    """CMakeLists.txt says it. The library was compiled with it, the rest asks the library, and the
    wheel's build reads that file."""
    source = (ROOT / "CMakeLists.txt").read_text()
    (version,) = re.findall(r"^project\(effinfer VERSION (\S+)", source, re.MULTILINE)
    assert effinfer.__version__ == effinfer.info().version == version
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and version not in project
    for folder in ("python", "csrc", "cmake", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".cmake", ".in"):
                assert f'"{version}"' not in path.read_text(), path


def test_the_installed_package_has_that_version():
    try:
        installed = importlib.metadata.distribution("effinfer")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("effinfer is used in place here")
    if not Path(effinfer.__file__).is_relative_to(Path(str(installed.locate_file("")))):
        pytest.skip("effinfer is used in place here")
    assert installed.version == effinfer.__version__
