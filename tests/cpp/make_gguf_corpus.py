"""Writes the corpus of the GGUF fuzz target: small sound files, each with other features.

    python make_gguf_corpus.py [MODEL.gguf]

With a model file the corpus also gets its header, cut to two layers and a vocabulary of 48, with
matrices of one block a row.
"""

import struct
import sys
from pathlib import Path

import gguf
import numpy as np

CORPUS = Path(__file__).parent / "corpus" / "gguf"
TYPES = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "IQ1_S", "MXFP4", "F64", "I32",
]  # fmt: skip
VOCABULARY = 48


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(type_name: str, rows: int) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Bytes of a matrix with one block a row."""
    kind = gguf.GGMLQuantizationType[type_name]
    size = rows * gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
    return data.reshape(rows, -1), kind


def write_values() -> None:
    writer = gguf.GGUFWriter(CORPUS / "values.bin", "llama")
    for i, kind in enumerate(gguf.GGUFValueType):
        if kind not in (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING):
            writer.add_key_value(f"value.{kind.name}", i % 2, kind)
    writer.add_string("value.text", "some text, \u65e5\u672c")
    writer.add_array("array.ints", [1, 2, 3])
    writer.add_array("array.floats", [0.5, 2.5])
    writer.add_array("array.bools", [True, False])
    writer.add_array("array.strings", ["", "a", "bc", "\u00e9"])
    finish(writer)


def write_tensors() -> None:
    writer = gguf.GGUFWriter(CORPUS / "tensors.bin", "llama")
    for i, name in enumerate(TYPES):
        data, kind = blocks(name, 1 + i % 3)
        writer.add_tensor(f"blk.{i}.weight", data, raw_dtype=kind)
    finish(writer)


def write_shapes() -> None:
    writer = gguf.GGUFWriter(CORPUS / "shapes.bin", "llama")
    writer.add_custom_alignment(64)
    for rank in range(1, 5):
        writer.add_tensor(f"rank{rank}", np.ones((2,) * rank, np.float32))
    finish(writer)


def write_i2_s() -> None:
    """A type that the gguf package does not know: two bits an element, a scale for all of them."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    head += struct.pack("<Q", 1) + b"w" + struct.pack("<IQQIQ", 2, 256, 2, 36, 0)
    codes = np.random.default_rng(4).integers(0, 3, (4, 128), dtype=np.uint8)
    data = (codes << np.array([6, 4, 2, 0], np.uint8)[:, None]).sum(0, np.uint8).tobytes()
    scale = struct.pack("<f28x", 0.25)
    (CORPUS / "i2_s.bin").write_bytes(head + bytes(-len(head) % 32) + data + scale)


def write_version_2() -> None:
    """The same layout with another version number."""
    data = bytearray((CORPUS / "values.bin").read_bytes())
    data[4] = 2
    (CORPUS / "version2.bin").write_bytes(data)


def write_model_header(model: str) -> None:
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(CORPUS / "model.bin", "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, value[:VOCABULARY])
        else:
            writer.add_key_value(key, value, field.types[0])
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) > 1:
            continue
        data, kind = blocks(tensor.tensor_type.name, 1)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    finish(writer)


def main() -> None:
    CORPUS.mkdir(parents=True, exist_ok=True)
    write_values()
    write_tensors()
    write_shapes()
    write_i2_s()
    write_version_2()
    if len(sys.argv) > 1:
        write_model_header(sys.argv[1])


if __name__ == "__main__":
    main()
