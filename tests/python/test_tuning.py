"""How far ahead weights are asked for: what a user sees of it. The measurement itself is tested in
tests/cpp/test_tuning.cpp."""

import os
import subprocess
import sys

import pytest

import effinfer
from effinfer import _core
from effinfer.hub import resolve

pytestmark = pytest.mark.alone

LOAD = """
import sys, warnings
import effinfer
warnings.simplefilter("error")
print(effinfer.LLM(sys.argv[1], max_seq_len=64).explain())
"""


FIXED = "int8=64/128,dense=0/64,panels_t2=8"


@pytest.fixture(scope="module")
def model():
    return resolve("smollm2-135m")


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def line_of(text):
    return next(line for line in text.splitlines() if line.startswith("fetch"))


def test_a_first_load_measures_and_a_second_one_reads(model, tmp_path):
    first = run("-c", LOAD, str(model), EFFINFER_CACHE=str(tmp_path))
    assert "measured: " in line_of(first.stdout), first.stderr
    assert f"bfloat16 products of prefill: {_core.describe_bf16()}" in first.stdout
    (kept,) = (tmp_path / "tuning").iterdir()
    before = kept.read_text()
    second = run("-c", LOAD, str(model), EFFINFER_CACHE=str(tmp_path))
    assert line_of(second.stdout) == line_of(first.stdout)
    assert kept.read_text() == before
    told = run("-m", "effinfer", "info", EFFINFER_CACHE=str(tmp_path))
    assert line_of(first.stdout).endswith(line_of(told.stdout).removeprefix("fetch").strip())


def test_a_cache_that_cannot_be_written_costs_a_warning(model, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    failed = run("-c", LOAD, str(model), EFFINFER_CACHE=str(tmp_path / "file"))
    assert "TuningCacheWarning" in failed.stderr
    assert "[tuning]" in failed.stderr


def test_the_environment_fixes_it(model, tmp_path):
    fixed = run("-c", LOAD, str(model), EFFINFER_CACHE=str(tmp_path), EFFINFER_TUNING=FIXED)
    assert "int8 64/128 (EFFINFER_TUNING)" in line_of(fixed.stdout)
    assert "dense 0/64 (EFFINFER_TUNING)" in line_of(fixed.stdout)
    assert not (tmp_path / "tuning").exists()


@pytest.mark.parametrize(
    "text",
    ["int8", "int8=1/0", "int4=64/0", "int8=64", "int8=64/0;", "panels_t2=1", "panels_t2=64/0"],
)
def test_a_wrong_environment_is_refused(text):
    found = run("-m", "effinfer", "info", EFFINFER_TUNING=text)
    assert found.returncode == 2
    assert "EFFINFER_TUNING" in found.stderr


def test_info_measures_when_asked(tmp_path):
    found = run("-m", "effinfer", "info", "--calibrate", EFFINFER_CACHE=str(tmp_path))
    assert "measured: " in line_of(found.stdout), found.stderr
    assert len(list((tmp_path / "tuning").iterdir())) == 1
    assert "int8 " in effinfer.info().tuning
