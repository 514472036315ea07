"""Files of the GGUF writer, read by the gguf package and by effinfer."""

import os

import gguf
import numpy as np
import pytest

from effinfer import _core

VALUES = {
    "general.architecture": "llama",
    "n.small": 7,
    "n.large": 2**40,
    "n.negative": -5,
    "n.very_negative": -(2**40),
    "x.float": 0.5,
    "b.yes": True,
    "s.text": "naïve 🙂",
    "a.texts": ["<s>", "", "日本"],
    "a.ints": np.array([1, -2, 3], np.int32),
    "a.floats": np.array([0.5, -1.5], np.float32),
    "a.bools": np.array([True, False]),
}


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def write(path, tensors, metadata=None):
    writer = _core.GgufWriter(path)
    for key, value in (metadata or {}).items():
        writer.set(key, value)
    for name, (dtype, shape, _) in tensors.items():
        writer.add_tensor(name, dtype, shape)
    for _, _, data in tensors.values():
        for piece in np.array_split(np.ascontiguousarray(data).view(np.uint8).ravel(), 3):
            writer.write(piece)
    writer.commit()


def test_metadata_and_tensors_are_read_back(tmp_path):
    path = tmp_path / "new.gguf"
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((3, 5)).astype(np.float32)
    tensors = {
        "odd": ("f32", floats.shape, floats),
        "none": ("f32", (0, 4), np.zeros(0, np.float32)),
        "q": ("q4_k", (2, 256), rng.integers(0, 100, 288, dtype=np.uint8)),
        "last": ("f16", (7,), np.arange(7, dtype=np.float16)),
    }
    write(path, tensors, VALUES)
    file = _core.GgufFile(path)
    assert file.version == 3 and file.alignment == 32
    for key, value in VALUES.items():
        assert plain(file.get(key)) == plain(value)
    assert file.value_type("a.ints") == "array[i32]"
    for name, (dtype, shape, data) in tensors.items():
        assert file.dtype(name) == dtype and file.shape(name) == shape
        assert np.array_equal(file.tensor_bytes(name), np.asarray(data).view(np.uint8).ravel())
    reader = gguf.GGUFReader(path)
    for key, value in VALUES.items():
        assert reader.fields[key].contents() == plain(value)
    assert [tensor.name for tensor in reader.tensors] == list(tensors)


def test_metadata_of_another_file(tmp_path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    write(first, {}, VALUES)
    writer = _core.GgufWriter(second)
    writer.set("s.text", "replaced by the copy")
    writer.copy_metadata(_core.GgufFile(first))
    writer.set("n.small", 8)
    writer.remove("a.texts")
    writer.remove("absent")
    writer.commit()
    file = _core.GgufFile(second)
    assert file.get("n.small") == 8 and file.get("s.text") == VALUES["s.text"]
    assert sorted(file.keys()) == sorted(VALUES.keys() - {"a.texts"})


def test_i2_s_in_a_file(tmp_path):
    values = (0.3 * np.random.default_rng(3).integers(-1, 2, (4, 256))).astype(np.float32)
    data, _ = _core.quantize("i2_s", values)
    path = tmp_path / "ternary.gguf"
    write(path, {"w": ("i2_s", values.shape, data), "v": ("f32", (1,), np.ones(1, np.float32))})
    file = _core.GgufFile(path)
    assert np.array_equal(file.dequantize("w"), values) and file.dequantize("v") == 1


def test_nothing_is_left_without_commit(tmp_path):
    target = tmp_path / "file.gguf"
    target.write_bytes(b"old")
    writer = _core.GgufWriter(target)
    writer.add_tensor("w", "f32", (4,))
    writer.write(np.zeros(3, np.float32))
    with pytest.raises(_core.InvalidArgumentError, match="expected 4 more bytes"):
        writer.commit()
    del writer
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.gguf"]
    assert target.read_bytes() == b"old"
    with pytest.raises(_core.FileError, match="cannot create"):
        _core.GgufWriter(tmp_path / "no" / "file.gguf")


def test_only_files_are_replaced(tmp_path):
    """A device would be lost for everyone, and a link would no longer lead anywhere."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(_core.FileError, match="cannot write .*: expected a file"):
            _core.GgufWriter(tmp_path / name)
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    _core.GgufWriter(tmp_path / "link").commit()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes()[:4] == b"GGUF"


def test_what_no_file_can_hold(tmp_path):
    writer = _core.GgufWriter(tmp_path / "file.gguf")
    for key in ("", "k" * 65536, "general.alignment"):
        with pytest.raises(_core.InvalidArgumentError, match="key"):
            writer.set(key, 1)
    for value, message in [
        (None, "value: expected int"),
        ({}, "value: expected int"),
        (np.zeros(2, np.float64), "expected an array of .*, got float64"),
    ]:
        with pytest.raises(_core.InvalidArgumentError, match=message):
            writer.set("k", value)
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(_core.InvalidArgumentError, match="int from -2\\^63 to 2\\^64 - 1"):
            writer.set("k", number)
    writer.add_tensor("w", "f32", (2,))
    for name, dtype, shape, message in [
        ("w", "f32", (2,), "each once"),
        ("", "f32", (2,), "a name of 1 to 65535 bytes"),
        ("a", "kv", (2,), "a type of files, got kv"),
        ("a", "q8_0", (31,), "multiple of 32"),
        ("a", "f32", (1, 1, 1, 1, 1), "at most 4 dimensions"),
        ("a", "f32", (-1, 2), "no int64 element count"),
        ("a", "f32", (2**40, 2**40), "no int64 element count"),
    ]:
        with pytest.raises(_core.InvalidArgumentError, match=message):
            writer.add_tensor(name, dtype, shape)
    with pytest.raises(_core.InvalidArgumentError, match="at most 8 bytes"):
        writer.write(np.zeros(3, np.float32))
    with pytest.raises(_core.InvalidArgumentError, match="C-contiguous"):
        writer.write(np.zeros(8, np.float32)[::4])
    writer.write(np.zeros(2, np.float32))
    with pytest.raises(_core.InvalidArgumentError, match="no more tensors"):
        writer.write(np.zeros(1, np.float32))
    for late in (lambda: writer.set("k", 1), lambda: writer.add_tensor("z", "f32", (1,))):
        with pytest.raises(_core.InvalidArgumentError, match="before the first data"):
            late()
