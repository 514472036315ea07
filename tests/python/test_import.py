"""What importing costs."""

import subprocess
import sys

import pytest

import effinfer

HEAVY = [
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "typer",
    "rich",
    "numpy",
    "effinfer._core",
]
PROGRAM = f"""\
import sys, time
started = time.perf_counter()
import effinfer
seconds = time.perf_counter() - started
print(seconds, *(name for name in {HEAVY!r} if name in sys.modules))
"""


def test_import_is_fast_and_loads_nothing_heavy():
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    results = [run.stdout.split() for run in runs]
    assert all(len(result) == 1 for result in results), results
    assert min(float(result[0]) for result in results) < 0.1


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
