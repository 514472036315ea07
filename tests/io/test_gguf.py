"""GGUF files against the gguf package: metadata, tensors, decoding, copies."""

import gc
import threading

import gguf
import numpy as np
import pytest

from effinfer import _core

PLAIN = ["f32", "f16", "bf16"]
QUANTIZED = [
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "tq1_0", "tq2_0",
]  # fmt: skip
# The types that the gguf package can also encode.
ENCODABLE = ["bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0"]
# Byte offsets of the float16 scales and minima in a block.
HALVES = {
    "q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q2_k": [80, 82],
    "q3_k": [108], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "iq4_nl": [0], "iq4_xs": [0],
    "tq1_0": [52], "tq2_0": [64],
}  # fmt: skip
EXTREME_HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00, 0x7C00, 0x7E00]


def type_of(name):
    return gguf.GGMLQuantizationType[name.upper()]


def reference(blocks, name):
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(blocks, type_of(name)), dtype=np.float32)


def assert_same_bits(actual, expected):
    """Equal bit for bit; a NaN of arithmetic has no defined sign or payload, so any NaN will do."""
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    same = actual.view(np.uint32) == expected.view(np.uint32)
    assert np.all(same | (np.isnan(actual) & np.isnan(expected)))


def check_decoding(blocks, name):
    size, type_bytes = gguf.GGML_QUANT_SIZES[type_of(name)]
    shape = (blocks.shape[0], blocks.shape[1] // type_bytes * size)
    assert_same_bits(_core.dequantize(name, blocks, shape), reference(blocks, name))


@pytest.mark.parametrize("name", QUANTIZED)
def test_random_bytes_decode_bit_equal(name):
    rng = np.random.default_rng(0)
    type_bytes = gguf.GGML_QUANT_SIZES[type_of(name)][1]
    check_decoding(rng.integers(0, 256, (37, 16 * type_bytes), dtype=np.uint8), name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_extreme_scales_decode_bit_equal(name):
    rng = np.random.default_rng(1)
    type_bytes = gguf.GGML_QUANT_SIZES[type_of(name)][1]
    rows = []
    for first in EXTREME_HALVES:
        for second in EXTREME_HALVES:
            block = rng.integers(0, 256, type_bytes, dtype=np.uint8)
            for offset, half in zip(HALVES[name], (first, second), strict=False):
                block[offset : offset + 2] = np.frombuffer(half.to_bytes(2, "little"), np.uint8)
            rows.append(block)
    check_decoding(np.stack(rows), name)


@pytest.mark.parametrize("name", ENCODABLE)
def test_quantised_values_decode_bit_equal(name):
    rng = np.random.default_rng(2)
    values = rng.standard_normal((5, 512)).astype(np.float32)
    check_decoding(gguf.quants.quantize(values, type_of(name)), name)


@pytest.mark.parametrize("shape", [(128,), (3, 256), (2, 2, 384), (0, 128)])
def test_i2_s_decodes(shape):
    """Groups of 32 from the top bits down, one scale behind all blocks: bitnet.cpp's order."""
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 3, shape)
    scale = np.float32(0.0371)
    shifts = np.array([6, 4, 2, 0])[:, None]
    data = (codes.reshape(-1, 4, 32) << shifts).sum(1).astype(np.uint8).ravel()
    if codes.size:
        data = np.concatenate([data, np.frombuffer(scale.tobytes() + bytes(28), np.uint8)])
    decoded = _core.dequantize("i2_s", data, shape)
    assert np.array_equal(decoded, scale * (codes - 1).astype(np.float32))


def test_every_16_bit_float_widens_to_the_same_bits():
    every = np.arange(65536, dtype=np.uint16)
    half = _core.dequantize("f16", every, (65536,))
    expected = every.view(np.float16).astype(np.float32)
    assert np.array_equal(half[~np.isnan(expected)], expected[~np.isnan(expected)])
    assert np.all(np.isnan(half[np.isnan(expected)]))
    brain = _core.dequantize("bf16", every, (65536,))
    assert np.array_equal(brain.view(np.uint32), every.astype(np.uint32) << 16)


def test_dequantize_checks_its_arguments():
    blocks = np.zeros(34, np.uint8)
    with pytest.raises(_core.InvalidArgumentError, match="expected 68 bytes"):
        _core.dequantize("q8_0", blocks, (2, 32))
    with pytest.raises(_core.InvalidArgumentError, match="multiple of 32"):
        _core.dequantize("q8_0", blocks, (31,))
    with pytest.raises(_core.InvalidArgumentError, match="C-contiguous"):
        _core.dequantize("q8_0", np.zeros(68, np.uint8)[::2], (32,))
    with pytest.raises(_core.InvalidArgumentError, match="dtype"):
        _core.dequantize("i32", np.zeros(4, np.int32), (4,))
    assert _core.dequantize("q8_0", np.zeros((0, 34), np.uint8), (0, 32)).shape == (0, 32)


TOKENS = ["<s>", "hello", "", "Ġworld", "日本", "🙂"] * 50


@pytest.fixture
def sample(tmp_path):
    """A file with every kind of metadata and a tensor of every type."""
    path = tmp_path / "sample.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("v.u8", 200)
    writer.add_int8("v.i8", -100)
    writer.add_uint16("v.u16", 60000)
    writer.add_int16("v.i16", -30000)
    writer.add_uint32("v.u32", 4_000_000_000)
    writer.add_int32("v.i32", -2_000_000_000)
    writer.add_uint64("v.u64", 2**64 - 1)
    writer.add_int64("v.i64", -(2**63))
    writer.add_float32("v.f32", 0.1)
    writer.add_float64("v.f64", 0.1)
    writer.add_bool("v.yes", True)
    writer.add_bool("v.no", False)
    writer.add_string("v.text", "naïve 🙂")
    writer.add_array("a.tokens", TOKENS)
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_array("a.bools", [True, False, True])
    rng = np.random.default_rng(3)
    tensors = {}
    for name in PLAIN + QUANTIZED:
        type_bytes = gguf.GGML_QUANT_SIZES[type_of(name)][1]
        width = 256 if name in PLAIN else 2
        raw = rng.integers(0, 127, (3, width * type_bytes), dtype=np.uint8)
        if name in ("f32", "f16"):
            raw = rng.standard_normal((3, 256)).astype(name.replace("f", "float"))
        tensors[name] = raw
        writer.add_tensor(f"t.{name}", raw, raw_dtype=type_of(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_metadata_equals_what_was_written(sample):
    file = _core.GgufFile(sample[0])
    assert file.version == 3 and file.alignment == 32
    assert file.path == str(sample[0]) and file.file_bytes == sample[0].stat().st_size
    expected = {
        "general.architecture": "llama", "v.u8": 200, "v.i8": -100, "v.u16": 60000,
        "v.i16": -30000, "v.u32": 4_000_000_000, "v.i32": -2_000_000_000, "v.u64": 2**64 - 1,
        "v.i64": -(2**63), "v.f32": float(np.float32(0.1)), "v.f64": 0.1, "v.yes": True,
        "v.no": False, "v.text": "naïve 🙂", "a.tokens": TOKENS, "a.ints": [1, -2, 3],
        "a.floats": [0.5, -1.5], "a.bools": [True, False, True],
    }  # fmt: skip
    assert sorted(file.keys()) == sorted(expected)
    everything = file.metadata()
    for key, value in expected.items():
        got = file.get(key)
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value
        assert type(got) is type(value) or isinstance(got, np.ndarray)
        assert list(everything[key]) == value if key == "a.tokens" else key in everything
    assert file.get("absent") is None and file.get("absent", 5) == 5
    assert file.value_type("a.ints") == "array[i32]" and file.value_type("v.yes") == "bool"
    assert file.value_type("v.u8") == "int" and file.value_type("v.f32") == "float"
    assert file.array_size("a.tokens") == len(TOKENS)
    assert file.strings("a.tokens") == TOKENS
    assert file.string_bytes("a.tokens") == [token.encode() for token in TOKENS]
    assert file.strings_where("a.tokens", "a.ints", -2) == {1: "hello"}
    assert file.strings_where("a.tokens", "a.floats", 0.5) == {0: "<s>"}
    assert file.strings_where("a.tokens", "a.bools", 1) == {0: "<s>", 2: ""}
    with pytest.raises(_core.InvalidArgumentError, match="array of numbers"):
        file.strings_where("a.tokens", "a.tokens", 1)
    lazy = everything["a.tokens"]
    assert len(lazy) == len(TOKENS) and lazy[4] == "日本" and lazy[-1] == TOKENS[-1]
    with pytest.raises(IndexError):
        lazy[len(TOKENS)]
    with pytest.raises(KeyError, match="absent"):
        file.value_type("absent")
    with pytest.raises(_core.InvalidArgumentError, match="array of strings"):
        file.strings("a.ints")
    with pytest.raises(_core.InvalidArgumentError, match="expected an array"):
        file.array_size("v.u8")


def test_number_arrays_are_read_only_and_outlive_the_file_object(sample):
    values = _core.GgufFile(sample[0]).get("a.ints")
    gc.collect()
    assert values.tolist() == [1, -2, 3] and not values.flags.writeable


def test_tensors_equal_what_was_written(sample):
    path, tensors = sample
    file = _core.GgufFile(path)
    assert [tensor.name for tensor in file.tensors()] == [f"t.{name}" for name in tensors]
    for described in file.tensors():
        name = described.type_name
        raw = tensors[name].view(np.uint8)
        size, type_bytes = gguf.GGML_QUANT_SIZES[type_of(name)]
        shape = (3, raw.shape[1] // type_bytes * size)
        assert described.dtype == name and described.shape == shape
        assert described.num_bytes == raw.nbytes
        assert described.name in file
        assert file.dtype(described.name) == name and file.shape(described.name) == shape
        data = file.tensor_bytes(described.name)
        assert not data.flags.writeable and np.array_equal(data, raw.ravel())
        assert_same_bits(file.dequantize(described.name), reference(tensors[name], name))
    data = file.tensor_bytes("t.q4_0")
    del file
    gc.collect()
    assert np.array_equal(data, tensors["q4_0"].ravel())


def test_copy_with_metadata_is_read_by_the_gguf_package(sample, tmp_path):
    path, tensors = sample
    target = tmp_path / "copy.gguf"
    text = "graph llama {\n" + "x" * 5000 + "\n}"
    _core.write_gguf_with_metadata(_core.GgufFile(path), "effinfer.graph", text, target)
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(target)
    assert after.fields["effinfer.graph"].contents() == text
    for key, field in before.fields.items():
        if not key.startswith("GGUF."):
            assert after.fields[key].contents() == field.contents()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.name == new.name and old.tensor_type == new.tensor_type
        assert np.array_equal(old.data.view(np.uint8), new.data.view(np.uint8))
    replaced = tmp_path / "replaced.gguf"
    _core.write_gguf_with_metadata(_core.GgufFile(target), "effinfer.graph", "short", replaced)
    again = gguf.GGUFReader(replaced)
    assert again.fields["effinfer.graph"].contents() == "short"
    assert len(again.fields) == len(after.fields)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "copy.gguf", "replaced.gguf", "sample.gguf",
    ]  # fmt: skip


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments(tmp_path, alignment):
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    values = [np.arange(n, dtype=np.float32) for n in (3, 1, 70)]
    for i, value in enumerate(values):
        writer.add_tensor(f"t{i}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = tmp_path / "copy.gguf"
    _core.write_gguf_with_metadata(_core.GgufFile(path), "k", "v", target)
    for name in (path, target):
        file = _core.GgufFile(str(name))
        assert file.alignment == alignment
        for i, value in enumerate(values):
            assert np.array_equal(file.dequantize(f"t{i}"), value)


def test_text_that_is_not_utf8_survives(sample, tmp_path):
    broken = b"\xff\xfeab\x80"
    path = tmp_path / "broken.gguf"
    data = sample[0].read_bytes()
    valid = b"v.text" + (8).to_bytes(4, "little")
    at = data.index(valid) + len(valid) + 8
    data = data[:at] + broken + data[at + len(broken) :]
    at = data.index(b"t.q8_0")
    path.write_bytes(data[:at] + b"t.q8\xff0" + data[at + 6 :])
    file = _core.GgufFile(path)
    assert file.get("v.text").encode("utf-8", "surrogateescape").startswith(broken)
    name = next(tensor.name for tensor in file.tensors() if tensor.type_name == "q8_0")
    assert name.encode("utf-8", "surrogateescape") == b"t.q8\xff0"
    assert file.tensor_bytes(name).nbytes == 204 and b"t.q8\xff0" in file
    with pytest.raises(_core.InvalidArgumentError, match="no tensor named"):
        file.dequantize(b"\xff\n")


def test_types_that_are_not_decoded(tmp_path):
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    raw = np.arange(2 * 66, dtype=np.uint8).reshape(2, 66)
    writer.add_tensor("odd", raw, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = _core.GgufFile(path)
    (tensor,) = file.tensors()
    assert tensor.dtype is None and tensor.type_name == "iq2_xxs" and tensor.shape == (2, 256)
    assert np.array_equal(file.tensor_bytes("odd"), raw.ravel())
    with pytest.raises(_core.UnsupportedError, match='tensor "odd": type iq2_xxs'):
        file.dequantize("odd")


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(_core.FileError, match="cannot open"):
        _core.GgufFile(tmp_path / "missing.gguf")
    with pytest.raises(_core.FileError, match="directory"):
        _core.GgufFile(tmp_path)
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    with pytest.raises(_core.FormatError, match="got no bytes"):
        _core.GgufFile(empty)
    with pytest.raises(TypeError):
        _core.GgufFile(5)


def test_memory_weights_keep_their_arrays():
    weights = _core.MemoryWeights()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    weights.add("w", array, "f32", (2, 3))
    weights.add("bf", np.zeros((2, 4), np.uint16), "bf16", (2, 4))
    assert "w" in weights and "v" not in weights
    assert weights.dtype("bf") == "bf16" and weights.shape("w") == (2, 3)
    with pytest.raises(_core.InvalidArgumentError, match="expected 24 bytes"):
        weights.add("x", array[:1], "f32", (2, 3))
    with pytest.raises(_core.InvalidArgumentError, match="C-contiguous"):
        weights.add("x", array.T, "f32", (3, 2))
    with pytest.raises(_core.InvalidArgumentError, match="no weight named"):
        weights.shape("x")

    class Tracked(np.ndarray):
        released = threading.Event()

        def __del__(self):
            self.released.set()

    weights.add("kept", np.zeros(4, np.float32).view(Tracked), "f32", (4,))
    gc.collect()
    assert not Tracked.released.is_set()
    del weights
    gc.collect()
    assert Tracked.released.is_set()
