"""The library as another C++ project sees it: find_package, load an artifact, generate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import effinfer
from tests.model_files import smollm2_path

SOURCE = Path(__file__).parent
MAX_TOKENS = 12


def tool(name: str) -> str:
    """A build tool of this environment, or of the machine."""
    local = Path(sys.executable).with_name(name)
    return str(local) if local.exists() else name


def run(*command: object, **options: object) -> subprocess.CompletedProcess:
    arguments = [str(argument) for argument in command]
    return subprocess.run(arguments, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
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
    return build / "embed"


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
