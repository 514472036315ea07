"""Ternary models on tiny random weights: BitNet b1.58, its predecessor, ternary llama.

The reference rounds activations to int8 in float32, too. Values on the edge between two steps may
round either way, after norms whose sums have another order: that happens to one value in 100 000
or fewer, and what follows it in the same sequence then differs by the noise of the quantisation.
So many short sequences are compared: most of them to float32's precision.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import GRAPH_KEY, open_model
from effinfer.testing import isa as isa_level
from tests.reference import ternary, tiny
from tests.reference.decoder import Decoder
from tests.reference.tiny import ternary_decoder
from tests.tolerance import F32_EPS, SAFETY

SEQUENCES = [tiny.TOKEN_IDS[3 * i : 3 * i + 3] for i in range(13)]
# Two layers of seven roundings, sums of 512 products: the most that float32 may differ by.
EXACT = SAFETY * F32_EPS * np.sqrt(2 * 7 * 512)
# A step of int8 is 1 / 127 of a row's peak, some 3 sigma: 0.7 % of the row. Two layers of four
# operands, of which a part differs.
NOISE = 0.007 * np.sqrt(2 * 4) * SAFETY
OPTIONAL = [name for name in _core.pass_names() if name.startswith(("merge", "fuse", "hoist"))]


@functools.cache
def expected(family: str) -> list[np.ndarray]:
    decoder = ternary_decoder(family)
    return [decoder.logits(tokens).numpy() for tokens in SEQUENCES]


def check(llm: effinfer.LLM, family: str, *, floor: float, phase: str = "prefill") -> None:
    """`floor`: the error that the engine's other arithmetic brings."""
    errors = []
    for tokens, logits in zip(SEQUENCES, expected(family), strict=True):
        actual = llm.logits(tokens, phase=phase)
        errors.append(np.linalg.norm(actual - logits) / np.linalg.norm(logits))
    assert max(errors) < NOISE + floor
    assert np.mean(np.array(errors) < EXACT + floor) >= 0.7


def write(family: str, folder: Path, **options: Any) -> Path:
    return tiny.write_gguf(tiny.TERNARY_FAMILIES[family], folder / f"{family}.gguf", **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: write(family, folder) for family in tiny.TERNARY_FAMILIES}


@pytest.mark.parametrize("family", tiny.TERNARY_FAMILIES)
def test_logits_are_the_reference_s(family: str, files: dict[str, Path], isa: str) -> None:
    exact = effinfer.LLM(files[family], precision="f32")
    check(exact, family, floor=0.0)
    check(exact, family, floor=0.0, phase="decode")


@pytest.mark.parametrize("dtype", ["tq1_0", "tq2_0"])
@pytest.mark.parametrize("family", ["bitnet", "bitnet_silu"])
def test_every_ternary_type_gives_the_same_bits(
    family: str, dtype: str, files: dict[str, Path], tmp_path: Path
) -> None:
    """The scales of these models are powers of two: every type holds them."""
    path = write(family, tmp_path, ternary_type=dtype)
    np.testing.assert_array_equal(
        effinfer.LLM(path).logits(tiny.TOKEN_IDS),
        effinfer.LLM(files[family]).logits(tiny.TOKEN_IDS),
    )


def folder_of(family: str, form: str, path: Path) -> Path:
    """A Hugging Face folder whose layers are packed for `form`, or master weights."""
    config = tiny.TERNARY_FAMILIES[family]
    if form == "online":
        return tiny.write_folder(config, path)
    arrays: tiny.Arrays = {}
    for name, array in tiny.weights(config).items():
        if not name.endswith("_proj.weight"):
            arrays[name] = array
            continue
        values, scale = ternary.absmean(array)
        arrays[name] = ternary.pack_hugging_face(values)
        stored = scale if form == "autobitlinear" else 1 / scale
        arrays[f"{name}_scale"] = np.array([stored], np.float32)
    quantization = {"quant_method": "bitnet", "linear_class": form}
    return tiny.write_folder({**config, "quantization_config": quantization}, path, arrays)


@pytest.mark.parametrize("form", ["online", "bitlinear", "autobitlinear"])
@pytest.mark.parametrize("family", ["bitnet", "llama_ternary"])
def test_folders_give_the_bits_of_the_file(
    family: str, form: str, files: dict[str, Path], tmp_path: Path
) -> None:
    folder = folder_of(family, form, tmp_path)
    of_folder, of_file = open_model(folder), open_model(files[family])
    assert [n["op"] for n in of_folder.graph.nodes] == [n["op"] for n in of_file.graph.nodes]
    assert of_folder.graph.metadata == of_file.graph.metadata
    logits = effinfer.LLM(folder, precision="f32").logits(tiny.TOKEN_IDS)
    expected = effinfer.LLM(files[family], precision="f32").logits(tiny.TOKEN_IDS)
    if family == "bitnet":  # llama's files pair other dimensions: sums of another order
        np.testing.assert_array_equal(logits, expected)
    else:
        check(effinfer.LLM(folder, precision="f32"), family, floor=0.0)


def test_the_first_bitnet_s_folder(files: dict[str, Path], tmp_path: Path) -> None:
    """It calls itself llama, and its sub-norms have other names."""
    config = {**tiny.TERNARY_FAMILIES["bitnet_silu"], "rope_theta": 10000.0}
    arrays = {
        name.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm"): a
        for name, a in tiny.weights(config).items()
    }
    folder = tiny.write_folder(config, tmp_path, arrays)
    np.testing.assert_array_equal(
        effinfer.LLM(folder).logits(tiny.TOKEN_IDS),
        effinfer.LLM(files["bitnet_silu"]).logits(tiny.TOKEN_IDS),
    )


@pytest.mark.parametrize("kind", ["t2", "t1_6"])
@pytest.mark.parametrize("family", tiny.TERNARY_FAMILIES)
def test_a_quantised_folder_is_the_same_model(family: str, kind: str, tmp_path: Path) -> None:
    folder = tiny.write_folder(tiny.TERNARY_FAMILIES[family], tmp_path / "folder")
    effinfer.quantize(folder, tmp_path / "of_folder.gguf", kind, head="f32")
    llm = effinfer.LLM(tmp_path / "of_folder.gguf", precision="f32")
    check(llm, family, floor=0.0)
    again = {"t2": "t1_6", "t1_6": "t2"}[kind]
    effinfer.quantize(tmp_path / "of_folder.gguf", tmp_path / "again.gguf", again, head="f32")
    np.testing.assert_array_equal(
        llm.logits(tiny.TOKEN_IDS),
        effinfer.LLM(tmp_path / "again.gguf", precision="f32").logits(tiny.TOKEN_IDS),
    )


def test_graph_of_bitnet(files: dict[str, Path]) -> None:
    graph = open_model(files["bitnet"]).graph
    assert graph.name == "bitnet"
    ops = [node["op"] for node in graph.nodes]
    assert ops.count("ternary_linear") == 2 * 7
    assert ops.count("linear") == 1
    assert ops.count("rms_norm") == 2 * 4 + 1
    assert ops.count("relu_squared") == 2
    assert "silu" in [node["op"] for node in open_model(files["bitnet_silu"]).graph.nodes]


def test_ternary_types_of_other_models_are_weights_like_any_other(tmp_path: Path) -> None:
    """TQ files of llama's architecture are quantised models, whose activations were never int8."""
    path = write("llama_ternary", tmp_path, ternary_type="tq2_0")
    assert "ternary_linear" not in {node["op"] for node in open_model(path).graph.nodes}
    config = tiny.TERNARY_FAMILIES["llama_ternary"]
    logits = effinfer.LLM(path, precision="f32").logits(tiny.TOKEN_IDS)
    decoder = Decoder.from_gguf(path)
    wanted = decoder.logits(tiny.TOKEN_IDS).numpy()
    assert config["hidden_size"] == 256
    assert np.linalg.norm(logits - wanted) < EXACT * np.linalg.norm(wanted)


@pytest.mark.parametrize("precision", ["f32", "fast"])
@pytest.mark.parametrize("disabled", [*OPTIONAL, "all"])
def test_passes_change_no_bit(disabled: str, precision: str, files: dict[str, Path]) -> None:
    passes = OPTIONAL if disabled == "all" else [disabled]
    plain = effinfer.LLM(files["bitnet"], precision=precision, disabled_passes=passes)
    fused = effinfer.LLM(files["bitnet"], precision=precision)
    for phase in ("decode", "prefill"):
        np.testing.assert_array_equal(
            plain.logits(tiny.TOKEN_IDS, phase=phase), fused.logits(tiny.TOKEN_IDS, phase=phase)
        )


@pytest.mark.parametrize("options", [{"precision": "f32"}, {"deterministic": True}])
@pytest.mark.parametrize("family", tiny.TERNARY_FAMILIES)
def test_decoding_is_prefill(family: str, options: dict[str, Any], files: dict[str, Path]) -> None:
    llm = effinfer.LLM(files[family], **options)
    np.testing.assert_array_equal(
        llm.logits(tiny.TOKEN_IDS, phase="decode"), llm.logits(tiny.TOKEN_IDS)
    )


@pytest.mark.parametrize("family", ["bitnet", "llama_ternary"])
def test_texts_do_not_depend_on_the_batch(family: str, files: dict[str, Path]) -> None:
    params = effinfer.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5)
    prompts = [tiny.TOKEN_IDS[i : i + 2 + 3 * i] for i in range(7)]

    def bits(outputs: list[Any]) -> list[Any]:
        return [
            (o.token_ids, [(step.logprob, step.top) for step in o.logprobs or ()]) for o in outputs
        ]

    llm = effinfer.LLM(files[family], prefix_cache=False, max_batch_tokens=256)
    together = bits(llm.generate(prompts, params))
    assert together == [bits(llm.generate([prompt], params))[0] for prompt in prompts]
    single = effinfer.LLM(files[family], prefix_cache=False, max_batch_tokens=256, threads=1)
    assert together == bits(single.generate(prompts, params))


@pytest.mark.parametrize("packing", ["t2", "t1_6"])
def test_packings_and_levels_change_no_ternary_bit(
    packing: str, files: dict[str, Path], isa: str
) -> None:
    """All but the head is exact or the same at every level; the head's products are float32."""
    llm = effinfer.LLM(files["bitnet"], precision="f32", ternary_packing=packing)
    assert f"packed {packing}" in llm.explain()
    automatic = effinfer.LLM(files["bitnet"], precision="f32")
    np.testing.assert_array_equal(llm.logits(tiny.TOKEN_IDS), automatic.logits(tiny.TOKEN_IDS))
    with isa_level("portable"):
        other = effinfer.LLM(files["bitnet"], precision="f32").logits(tiny.TOKEN_IDS)
    error = np.linalg.norm(llm.logits(tiny.TOKEN_IDS) - other) / np.linalg.norm(other)
    assert error < NOISE


def test_a_pack_cache_holds_each_packing(files: dict[str, Path], tmp_path: Path) -> None:
    def load(packing: str) -> Any:
        return effinfer.LLM(files["bitnet"], ternary_packing=packing, pack_cache=tmp_path)

    for packing in ("t2", "t1_6"):
        assert load(packing).engine.pack_cache.state == "stored"
    for packing in ("t2", "t1_6"):
        llm = load(packing)
        assert llm.engine.pack_cache.state == "hit"
        assert f"packed {packing}" in llm.explain()


@pytest.mark.parametrize("head", ["q8_0", "q6_k"])
@pytest.mark.parametrize("family", ["bitnet", "llama_ternary"])
def test_a_head_of_another_type(
    head: str, family: str, files: dict[str, Path], tmp_path: Path
) -> None:
    """The bits of a file whose output matrix has that type; the embedding stays as it is."""
    config = tiny.TERNARY_FAMILIES[family]
    folder = tiny.write_folder(config, tmp_path / "folder")
    name = "token_embd.weight" if config["tie_word_embeddings"] else "output.weight"
    data, _ = _core.quantize(head, tiny.gguf_weights(config)[name])
    matrix = _core.dequantize(head, data, tiny.gguf_weights(config)[name].shape)
    arrays = dict(tiny.weights(config), **{"lm_head.weight": matrix})
    untied = {**config, "tie_word_embeddings": False}
    wanted = effinfer.LLM(tiny.write_folder(untied, tmp_path / "untied", arrays), precision="f32")
    for model in (files[family], folder):
        llm = effinfer.LLM(model, precision="f32", head=head)
        assert "output.weight" in llm.explain()
        if model == folder:
            np.testing.assert_array_equal(llm.logits(tiny.TOKEN_IDS), wanted.logits(tiny.TOKEN_IDS))
    fast = effinfer.LLM(files[family], head=head)
    error = fast.logits(tiny.TOKEN_IDS[:4], phase="decode") - wanted.logits(tiny.TOKEN_IDS[:4])
    assert np.linalg.norm(error) < NOISE * np.linalg.norm(wanted.logits(tiny.TOKEN_IDS[:4]))


def test_a_wrong_head(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(_core.InvalidArgumentError, match="q9"):
        effinfer.LLM(files["bitnet"], head="q9")
    artifact = tmp_path / "artifact.gguf"
    model = open_model(files["bitnet"])
    assert model.gguf is not None
    _core.write_gguf_with_metadata(model.gguf, GRAPH_KEY, str(model.graph), str(artifact))
    with pytest.raises(_core.UnsupportedError, match="head"):
        effinfer.LLM(artifact, head="q8_0")
    np.testing.assert_array_equal(
        effinfer.LLM(artifact).logits(tiny.TOKEN_IDS),
        effinfer.LLM(files["bitnet"]).logits(tiny.TOKEN_IDS),
    )


def test_wrong_packing(files: dict[str, Path]) -> None:
    with pytest.raises(_core.InvalidArgumentError, match=r"ternary_packing.*t1_6.*got 't3'"):
        effinfer.LLM(files["bitnet"], ternary_packing="t3")


def rewrite(source: Path, target: Path, more: dict[str, np.ndarray], halved: str = "") -> Path:
    """A copy with more float32 tensors, and with the scale of an i2_s tensor halved."""
    file = _core.GgufFile(str(source))
    writer = _core.GgufWriter(str(target))
    writer.copy_metadata(file)
    names = [tensor.name for tensor in file.tensors()]
    for name in names:
        writer.add_tensor(name, file.dtype(name), file.shape(name))
    for name, array in more.items():
        writer.add_tensor(name, "f32", array.shape)
    for name in names:
        data = np.array(file.tensor_bytes(name))
        if name == halved:
            data[-32:][:4].view(np.float32)[0] *= 0.5
        writer.write(data)
    for array in more.values():
        writer.write(array.view(np.uint8))
    writer.commit()
    return target


def test_scales_beside_the_weights(files: dict[str, Path], tmp_path: Path) -> None:
    half = np.array([0.5], np.float32)
    beside = rewrite(files["bitnet"], tmp_path / "a.gguf", {"blk.1.ffn_up.scale": half})
    within = rewrite(files["bitnet"], tmp_path / "b.gguf", {}, "blk.1.ffn_up.weight")
    logits = effinfer.LLM(beside).logits(tiny.TOKEN_IDS)
    np.testing.assert_array_equal(logits, effinfer.LLM(within).logits(tiny.TOKEN_IDS))
    assert (logits != effinfer.LLM(files["bitnet"]).logits(tiny.TOKEN_IDS)).any()


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"blk.0.attn_q.scale": np.ones(2, np.float32)}, "FormatError", "one finite number"),
        ({"blk.0.attn_q.scale": np.full(1, np.nan, np.float32)}, "FormatError", "finite"),
        (
            {"blk.0.attn_q.scale": np.ones(1, np.float32), "blk.0.attn_q.bias": np.ones(256)},
            "UnsupportedError",
            "none beside a bias",
        ),
        (
            {f"blk.{i}.attn_gate.weight": np.ones(4, np.float32) for i in range(5)},
            "UnsupportedError",
            r"tensors of bitnet, got also blk\.0.*, blk\.1.*, blk\.2.* and 2 more",
        ),
    ],
)
def test_tensors_that_the_definition_does_not_read(
    more: dict[str, np.ndarray], error: str, message: str, files: dict[str, Path], tmp_path: Path
) -> None:
    arrays = {name: array.astype(np.float32) for name, array in more.items()}
    path = rewrite(files["bitnet"], tmp_path / "more.gguf", arrays)
    with pytest.raises(getattr(_core, error), match=message):
        open_model(path)
