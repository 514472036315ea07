"""What importing costs."""

import subprocess
import sys

import pytest

import effinfer

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


@pytest.mark.parametrize("name", effinfer.__all__)
def test_every_public_name_resolves(name):
    assert getattr(effinfer, name) is not None
    assert name in dir(effinfer)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = effinfer.nothing


def test_version_is_that_of_the_core():
    assert effinfer.__version__ == effinfer.info().version
