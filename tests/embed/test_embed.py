"""The library as another C++ project sees it: find_package, load an artifact, generate."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import effinfer
from tests.model_files import smollm2_path

SOURCE = Path(__file__).parent
MAX_TOKENS = 12
EMULATED = os.environ.get("EFFINFER_EMULATED", "")
HAS_GPU = "cuda:0" in effinfer.info().devices


def tool(name: str) -> str:
    """A build tool of this environment, or of the machine."""
    local = Path(sys.executable).with_name(name)
    return str(local) if local.exists() else name


def run(*command: object, **options: object) -> subprocess.CompletedProcess:
    arguments = [str(argument) for argument in command]
    return subprocess.run(arguments, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    build = tmp_path_factory.mktemp("embed")
    cmake_dir = run(sys.executable, "-m", "effinfer", "--cmake-dir", check=True).stdout.strip()
    assert (Path(cmake_dir) / "effinferConfig.cmake").exists()
    configure = run(
        tool("cmake"), "-S", SOURCE, "-B", build, f"-Deffinfer_DIR={cmake_dir}",
        "-DCMAKE_BUILD_TYPE=Release",
    )  # fmt: skip
    assert configure.returncode == 0, configure.stderr
    compiled = run(tool("cmake"), "--build", build)
    assert compiled.returncode == 0, compiled.stdout
    return build


@pytest.fixture(scope="module")
def program(programs) -> Path:
    return programs / "embed"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "smollm2.gguf"
    run(sys.executable, "-m", "effinfer", "compile", smollm2_path(), "-o", path, check=True)
    return path


def test_generates_the_same_tokens_as_python(program, artifact):
    llm = effinfer.LLM(artifact, precision="f32")
    prompt = llm.tokenize("The capital of France is")
    params = effinfer.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    expected = llm.generate([prompt], params)[0].token_ids

    result = run(program, artifact, MAX_TOKENS, *prompt, check=True)
    assert [int(line) for line in result.stdout.split()] == expected


def test_a_plain_gguf_is_refused_with_advice(program):
    result = run(program, smollm2_path(), 4, 1)
    assert result.returncode == 1
    assert "effinfer.graph" in result.stderr and "effinfer compile" in result.stderr


def test_a_cpu_without_the_level_gets_an_error_not_a_crash(program, artifact):
    result = run(program, artifact, 4, 1, env={**os.environ, "EFFINFER_ISA": "sse9"})
    assert result.returncode == 1
    assert "sse9" in result.stderr and "portable" in result.stderr


@pytest.mark.skipif(not HAS_GPU and not EMULATED, reason="needs a GPU or EFFINFER_EMULATED")
def test_an_operator_runs_on_arrays_of_a_gpu_in_the_callers_stream(programs):
    environment = dict(os.environ) if HAS_GPU else {**os.environ, "LD_PRELOAD": EMULATED}
    result = run(programs / "queue", "cuda:0", env=environment)
    assert result.returncode == 0, result.stderr
    got = np.array([float(line) for line in result.stdout.split()]).reshape(3, 8)
    x = (np.arange(24) * 37 % 17 / 4 - 2).reshape(3, 8)
    scale = np.sqrt((x * x).mean(1, keepdims=True) + 1e-6)
    # A few roundings of float32 in the sum, the root and both products.
    np.testing.assert_allclose(got, x / scale * (1 + np.arange(8) / 8), rtol=1e-6, atol=0)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error(programs):
    result = run(programs / "queue", "cuda:0")
    assert result.returncode == 1
    assert "cuda:0" in result.stderr and "cpu" in result.stderr
