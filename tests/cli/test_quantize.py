"""effinfer quantize, as a script sees it."""

import json
import subprocess
import sys

import pytest

from tests.reference import tiny


def effinfer(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "effinfer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def test_quantize_and_generate(model, tmp_path):
    out = tmp_path / "new.gguf"
    result = effinfer("quantize", "-m", model, "--type", "q8_0", "--head", "f16", "-o", out)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert "100%" in result.stderr and "f32 -> q8_0" in result.stderr
    text = effinfer("generate", "-m", out, "th", "-n", 4, "--ignore-eos", "-q")
    assert text.returncode == 0, text.stderr
    shown = effinfer("inspect", out)
    assert "q8_0: 21 tensors" in shown.stdout and "f16: 2 tensors" in shown.stdout


def test_json_tells_each_tensor(model, tmp_path):
    out = tmp_path / "new.gguf"
    result = effinfer("quantize", "-m", model, "--type", "q4_0", "-o", out, "--json", "-q")
    facts = json.loads(result.stdout)
    assert result.stderr == ""
    assert facts["path"] == str(out) and facts["num_bytes"] == out.stat().st_size
    by_name = {tensor["name"]: tensor for tensor in facts["tensors"]}
    assert by_name["output.weight"]["type"] == "q4_0"
    assert 0 < by_name["output.weight"]["error"] < 0.12
    assert by_name["output_norm.weight"]["error"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--type", "q3"], 2, "type: expected one of"),
        (["--type", "q8_0", "--head", "q3"], 2, "head: expected one of"),
        (["--type", "q8_0", "--i2s-order", "odd"], 2, "i2_s_order: expected one of"),
        ([], 2, "--type"),
    ],
)
def test_wrong_usage(model, tmp_path, arguments, code, words):
    out = tmp_path / "new.gguf"
    result = effinfer("quantize", "-m", model, "-o", out, *arguments)
    assert result.returncode == code and words in result.stderr
    assert "Traceback" not in result.stderr and not out.exists()


def test_errors_of_files(model, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:1000])
    result = effinfer("quantize", "-m", cut, "--type", "q8_0", "-o", tmp_path / "new.gguf")
    assert result.returncode == 1 and "effinfer: error: [gguf]" in result.stderr
    result = effinfer("quantize", "-m", model, "--type", "q8_0", "-o", tmp_path / "a" / "b")
    assert result.returncode == 1 and "cannot create" in result.stderr
