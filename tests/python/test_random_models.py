"""Models with random weights in the shapes of real ones."""

import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.testing import SHAPES, make_model

SMALL = {
    "hidden": 256, "ffn": 512, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64,
    "vocab": 300, "context": 256,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_random_models_have_the_parts_of_their_architecture(name, tmp_path):
    path = make_model(name, tmp_path / "model.gguf", **SMALL)
    file = _core.GgufFile(path)
    assert file.get("general.architecture") == SHAPES[name].architecture
    assert ("output.weight" in file) is not SHAPES[name].tied
    layers = {dtype_of(file, i) for i in range(2)}
    assert layers == {"i2_s" if "bitnet" in name else "q8_0"}
    logits = effinfer.LLM(path).logits([298, 5, 77])
    assert logits.shape == (3, 300) and np.isfinite(logits).all() and logits.std() > 0.5


def dtype_of(file, layer):
    return file.dtype(f"blk.{layer}.ffn_up.weight")


def test_random_models_repeat_and_change(tmp_path):
    first = make_model("llama-tiny", tmp_path / "a.gguf").read_bytes()
    assert make_model("llama-tiny", tmp_path / "b.gguf").read_bytes() == first
    assert make_model("llama-tiny", tmp_path / "b.gguf", seed=1).read_bytes() != first
    path = make_model("llama-tiny", tmp_path / "c.gguf", type="q4_k", head="q6_k", tied=False)
    file = _core.GgufFile(path)
    assert dtype_of(file, 0) == "q4_k" and file.dtype("output.weight") == "q6_k"
    path = make_model("llama-tiny", tmp_path / "d.gguf", type="t1_6", ffn=800)
    file = _core.GgufFile(path)
    assert file.dtype("blk.0.ffn_up.weight") == "tq1_0"
    assert file.dtype("blk.0.ffn_down.weight") == "q8_0"  # rows of 800 are no whole blocks of 256
    values = file.dequantize("blk.0.ffn_up.weight")
    assert len(np.unique(values)) == 3 and 0.9 < np.linalg.norm(values, axis=1).mean() < 1.1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt-5", {}, "name: expected one of bitnet-2b4t"),
        ("llama-tiny", {"depth": 3}, "depth"),
        ("llama-tiny", {"type": "q3"}, "type: expected one of"),
        ("llama-tiny", {"vocab": 100}, "vocab: expected at least 258"),
    ],
)
def test_random_models_that_cannot_be_made(name, changes, message, tmp_path):
    with pytest.raises(_core.InvalidArgumentError, match=message):
        make_model(name, tmp_path / "model.gguf", **changes)
    assert not list(tmp_path.iterdir())
