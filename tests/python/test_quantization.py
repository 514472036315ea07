"""Whole models to other weight types: what is kept, what changes, and what is refused."""

from pathlib import Path

import gguf
import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import open_model
from effinfer.files.i2_s_orders import in_x86_order
from effinfer.text.tokenizer_gguf import PATTERNS, build_tokenizer
from tests.reference import tiny

EPSILON = float(np.finfo(np.float32).eps)


def relative_error(actual, expected):
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def logits_of(path):
    return effinfer.LLM(str(path), precision="f32").logits(tiny.TOKEN_IDS)


def write_matrices(path, matrices, dtype="f32", **metadata):
    """A file of layer matrices that no model definition reads."""
    writer = _core.GgufWriter(path)
    writer.set("general.architecture", "other")
    for key, value in metadata.items():
        writer.set(key, value)
    for name, values in matrices.items():
        writer.add_tensor(name, dtype, values.shape)
    for values in matrices.values():
        writer.write(_core.quantize(dtype, values)[0])
    writer.commit()
    return path


def ternary(scale, shape, seed=0):
    digits = np.random.default_rng(seed).integers(-1, 2, shape)
    return (np.float32(scale) * digits).astype(np.float32)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_folder_becomes_a_file_of_the_same_model(name, tmp_path):
    folder = tiny.write_folder(tiny.FAMILIES[name], tmp_path / "folder")
    path = tmp_path / "model.gguf"
    result = effinfer.quantize(folder, path, "f32")
    assert all(tensor.error == 0 and tensor.type == "f32" for tensor in result.tensors)
    assert relative_error(logits_of(path), logits_of(folder)) < 64 * EPSILON
    files, expected = open_model(path), open_model(folder)
    assert files.graph.metadata == expected.graph.metadata
    text = "the théatre\n  th"
    assert files.tokenizer().encode(text) == expected.tokenizer().encode(text)
    # As other programs read it, without tokenizer.json.
    reader = gguf.GGUFReader(path)
    words = reader.fields["tokenizer.ggml.tokens"].contents()
    assert words == [tiny.tokenizer().id_to_token(i) for i in range(tiny.VOCAB_SIZE)]
    assert reader.fields["tokenizer.ggml.merges"].contents() == [" ".join(tiny.MERGE)]
    # And the same as a file that was made by other means.
    other = gguf.GGUFReader(tiny.write_gguf(tiny.FAMILIES[name], tmp_path / "other.gguf"))
    theirs = {tensor.name: np.array(tensor.data) for tensor in other.tensors}
    for tensor in reader.tensors:
        np.testing.assert_array_equal(tensor.data, theirs.pop(tensor.name))
    assert not theirs
    for key, field in other.fields.items():
        if not key.startswith(("GGUF.", "tokenizer.ggml.")):
            assert reader.fields[key].contents() == field.contents(), key


@pytest.mark.parametrize("family", PATTERNS)
def test_pre_tokenizers_keep_their_name(family, tmp_path):
    """A folder whose tokenizer was built from a GGUF name gets that name again."""
    folder = tiny.write_folder(tiny.FAMILIES["llama"], tmp_path / "folder")
    words = [tiny.tokenizer().id_to_token(i) for i in range(tiny.VOCAB_SIZE)]
    keys = {"model": "gpt2", "pre": family, "tokens": words, "merges": [" ".join(tiny.MERGE)]}
    built = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    built.save(str(folder / "tokenizer.json"))
    effinfer.quantize(folder, tmp_path / "model.gguf", "f32")
    assert _core.GgufFile(tmp_path / "model.gguf").get("tokenizer.ggml.pre") == family


def test_a_file_keeps_its_metadata_and_vectors(tmp_path):
    path = tiny.write_gguf(tiny.FAMILIES["qwen2"], tmp_path / "model.gguf")
    artifact = tmp_path / "artifact.gguf"
    graph = open_model(path).graph.to_string()
    _core.write_gguf_with_metadata(_core.GgufFile(path), "effinfer.graph", graph, artifact)
    target = tmp_path / "new.gguf"
    result = effinfer.quantize(artifact, target, "q8_0", head="f16")
    old, new = _core.GgufFile(path), _core.GgufFile(target)
    changed = {"general.file_type", "general.quantization_version"}
    assert set(new.keys()) == set(old.keys()) | changed
    for key in set(old.keys()) - changed:
        same = np.array_equal(new.get(key), old.get(key))
        assert same and new.value_type(key) == old.value_type(key)
    assert new.get("general.file_type") == 7
    for tensor in result.tensors:
        outer = tensor.name in ("token_embd.weight", "output.weight")
        expected = "f32" if len(tensor.shape) == 1 else "f16" if outer else "q8_0"
        assert tensor.type == new.dtype(tensor.name) == expected
        assert (tensor.error == 0) == (expected == "f32")
        assert tensor.num_bytes == new.tensor_bytes(tensor.name).nbytes
    assert result.num_bytes == target.stat().st_size < result.source_bytes / 2
    assert result.to_dict()["path"] == str(target)
    assert relative_error(logits_of(target), logits_of(path)) < 0.05


def test_rows_that_are_no_whole_blocks(tmp_path):
    shapes = {"blk.0.a.weight": 256, "blk.0.b.weight": 96, "blk.0.c.weight": 33, "mm.weight": 256}
    values = {name: np.ones((2, cols), np.float32) for name, cols in shapes.items()}
    path = write_matrices(tmp_path / "a.gguf", values)
    result = effinfer.quantize(path, tmp_path / "b.gguf", "q4_k")
    types = {tensor.name: tensor.type for tensor in result.tensors}
    assert list(types.values()) == ["q4_k", "q8_0", "f16", "f32"]


@pytest.mark.parametrize("scale", [0.0390625, 0.1])
def test_ternary_weights_survive_every_conversion(tmp_path, scale):
    values = {f"blk.{i}.ffn_up.weight": ternary(scale, (6, 512), i) for i in range(2)}
    path = write_matrices(tmp_path / "start.gguf", values)
    # The first step holds the scale as float32, those after it as float16, exactly where it fits.
    # What has a scale a block stays so: i2_s holds one.
    stored = {"t2": "i2_s", "t1_6": "tq1_0", "tq2_0": "tq2_0", "i2_s": "tq2_0"}
    for step, kind in enumerate(stored):
        target = tmp_path / f"{step}.gguf"
        result = effinfer.quantize(path, target, kind)
        held = np.float32(scale) if step == 0 else np.float32(np.float16(scale))
        for tensor in result.tensors:
            assert tensor.type == stored[kind]
            got = _core.GgufFile(target).dequantize(tensor.name)
            signs = np.sign(values[tensor.name]).astype(np.float32)
            np.testing.assert_array_equal(got, held * signs)
        path = target


@pytest.mark.parametrize("order", ["x86", "arm", "rows"])
def test_orders_of_i2_s(tmp_path, order):
    values = ternary(0.3, (8, 256))
    codes = (np.sign(values) + 1).astype(np.uint8)
    fields = {
        "x86": codes.reshape(-1, 4, 32),
        "arm": codes.reshape(-1, 4, 16),
        "rows": codes.reshape(-1, 4, 256),
    }[order]
    body = (fields << np.array([6, 4, 2, 0], np.uint8)[:, None]).sum(1, np.uint8).ravel()
    tail = np.frombuffer(np.float32(0.3).tobytes() + bytes(28), np.uint8)
    data = np.concatenate([body, tail])
    path = tmp_path / "source.gguf"
    writer = _core.GgufWriter(path)
    writer.add_tensor("blk.0.w.weight", "i2_s", values.shape)
    writer.write(data)
    writer.commit()
    for kind in ("i2_s", "t1_6", "f32"):
        target = tmp_path / f"{kind}.gguf"
        effinfer.quantize(path, target, kind, i2_s_order=order)
        got = _core.GgufFile(target).dequantize("blk.0.w.weight")
        np.testing.assert_allclose(got, values, rtol=2**-11 if kind == "t1_6" else 0)
    if order == "rows":
        with pytest.raises(_core.FormatError, match="expected fours"):
            in_x86_order(data[: 6 * 64 + 32], (6, 256), order)


def test_progress_counts_weights_and_may_stop(tmp_path):
    path = tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path / "model.gguf")
    reports = []
    effinfer.quantize(path, tmp_path / "a.gguf", "q8_0", progress=lambda *r: reports.append(r))
    assert [name for name, _, _ in reports] == [t.name for t in _core.GgufFile(path).tensors()]
    assert reports[-1][1] == reports[-1][2] > 0

    def stop(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        effinfer.quantize(path, tmp_path / "b.gguf", "q8_0", progress=stop)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.gguf", "model.gguf"]


def test_what_is_refused(tmp_path):
    path = tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path / "model.gguf")
    out = tmp_path / "out.gguf"
    for arguments, message in [
        ((path, out, "q9"), "type: expected one of t2, t1_6, f32"),
        ((path, out, "q2_k"), "type: expected one of"),
        ((path, path, "q8_0"), "another file than the model"),
    ]:
        with pytest.raises(_core.InvalidArgumentError, match=message):
            effinfer.quantize(*arguments)
    with pytest.raises(_core.InvalidArgumentError, match="head: expected one of"):
        effinfer.quantize(path, out, "q8_0", head="int8")
    with pytest.raises(_core.InvalidArgumentError, match="i2_s_order: expected one of"):
        effinfer.quantize(path, out, "q8_0", i2_s_order="mips")
    with pytest.raises(_core.FileError, match=r"no such file or folder: .*missing\.gguf"):
        effinfer.quantize(tmp_path / "missing.gguf", out, "q8_0")
    with pytest.raises(_core.FileError, match="cannot create"):
        effinfer.quantize(path, tmp_path / "no" / "out.gguf", "q8_0")
    with pytest.raises(_core.FileError, match=r"config\.json"):
        effinfer.quantize(tmp_path, out, "q8_0")
    with pytest.raises(_core.InvalidArgumentError, match="expected 0 .* or more threads, got -1"):
        effinfer.quantize(path, out, "q8_0", threads=-1)
    folder = tiny.write_folder(tiny.FAMILIES["llama"], tmp_path / "folder")
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(_core.InvalidArgumentError, match="another file than the model"):
            effinfer.quantize(folder, folder / name, "q8_0")
    assert not out.exists()


def test_hostile_files(tmp_path):
    whole = tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path / "model.gguf").read_bytes()
    out = tmp_path / "out.gguf"
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(_core.FormatError, match=r"\[gguf\] .*cut\.gguf: "):
            effinfer.quantize(cut, out, "q8_0")
    values = np.ones((2, 256), np.float32)
    values[1, 7] = np.nan
    path = tmp_path / "nan.gguf"
    writer = _core.GgufWriter(path)
    writer.add_tensor("blk.0.w.weight", "f32", values.shape)
    writer.write(values)
    writer.commit()
    with pytest.raises(_core.InvalidArgumentError, match="finite"):
        effinfer.quantize(path, out, "q4_0")
    odd = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    raw = np.zeros((2, 66), np.uint8)
    odd.add_tensor("blk.0.w.weight", raw, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    odd.write_header_to_file()
    odd.write_kv_data_to_file()
    odd.write_tensors_to_file()
    odd.close()
    with pytest.raises(_core.UnsupportedError, match="iq2_xxs"):
        effinfer.quantize(tmp_path / "odd.gguf", out, "q4_0")
    left = sorted(entry.name for entry in Path(tmp_path).iterdir())
    assert left == ["cut.gguf", "model.gguf", "nan.gguf", "odd.gguf"]


def test_a_model_that_gguf_cannot_describe(tmp_path):
    config = {
        **tiny.FAMILIES["mistral"],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    folder = tiny.write_folder(config, tmp_path / "folder")
    with pytest.raises(_core.UnsupportedError, match="sliding_layers: GGUF files of llama"):
        effinfer.quantize(folder, tmp_path / "out.gguf", "q8_0")
