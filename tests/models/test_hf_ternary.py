"""Ternary layers of Hugging Face folders become i2_s tensors of the same values."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.bitnet import pack_weights

from effinfer import _core
from effinfer.checkpoints.folder_weights import gguf_name, load_folder_weights
from effinfer.checkpoints.hf_ternary import TernaryFormat, ternary_format
from effinfer.checkpoints.model_files import open_model
from tests.reference import ternary, tiny

RNG = np.random.default_rng(11)
VALUES = RNG.integers(-1, 2, (12, 256)).astype(np.int8)
MODULE = "model.layers.0.self_attn.q_proj"


def load(tmp_path, tensors, form):
    save_file(
        {key: torch.as_tensor(value) for key, value in tensors.items()}, tmp_path / "m.safetensors"
    )
    return load_folder_weights(tmp_path, "llama", tied_head=False, ternary=form)


def dequantized(weights, name="blk.0.attn_q.weight"):
    return weights.dequantize(name)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_packed(tmp_path, divides, dtype):
    scale = torch.tensor([0.37]).to(dtype)
    tensors = {
        f"{MODULE}.weight": ternary.pack_hugging_face(VALUES),
        f"{MODULE}.weight_scale": scale,
    }
    weights = load(tmp_path, tensors, TernaryFormat(scale_divides=divides))
    assert weights.dtype("blk.0.attn_q.weight") == "i2_s"
    factor = scale.float().numpy()[0]
    factor = np.float32(1) / factor if divides else factor
    np.testing.assert_array_equal(dequantized(weights), VALUES * factor)


def test_packing_is_that_of_transformers():
    packed = pack_weights(torch.tensor(VALUES.astype(np.int64)))
    np.testing.assert_array_equal(packed.numpy(), ternary.pack_hugging_face(VALUES))


def test_scales_may_lie_in_another_file(tmp_path):
    save_file(
        {f"{MODULE}.weight": torch.tensor(ternary.pack_hugging_face(VALUES))},
        tmp_path / "a.safetensors",
    )
    save_file({f"{MODULE}.weight_scale": torch.tensor([0.5])}, tmp_path / "b.safetensors")
    form = TernaryFormat(scale_divides=False)
    weights = load_folder_weights(tmp_path, "llama", tied_head=False, ternary=form)
    np.testing.assert_array_equal(dequantized(weights), VALUES * np.float32(0.5))


def test_unpacked(tmp_path):
    tensors = {
        f"{MODULE}.weight": torch.tensor(VALUES).to(torch.bfloat16),
        f"{MODULE}.weight_scale": torch.tensor([4.0]),
    }
    np.testing.assert_array_equal(
        dequantized(load(tmp_path, tensors, TernaryFormat())), VALUES * np.float32(0.25)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_master_weights(tmp_path, dtype):
    master = torch.tensor(RNG.normal(0, 0.03, (8, 384)).astype(np.float32)).to(dtype)
    form = TernaryFormat(online=True, excluded=("model.layers.1.mlp",))
    tensors = {
        f"{MODULE}.weight": master,
        "model.layers.1.mlp.up_proj.weight": master.clone(),
        "lm_head.weight": master.clone(),
        "model.layers.0.input_layernorm.weight": torch.ones(384, dtype=dtype),
    }
    weights = load(tmp_path, tensors, form)
    values, scale = ternary.absmean(master.float().numpy())
    np.testing.assert_array_equal(dequantized(weights), values * np.float32(scale))
    name = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}[dtype]
    assert weights.dtype("blk.1.ffn_up.weight") == name
    assert weights.dtype("output.weight") == name
    assert weights.dtype("blk.0.attn_norm.weight") == "f32"


def test_layers_that_were_left_alone_stay(tmp_path):
    weights = load(tmp_path, {f"{MODULE}.weight": torch.ones(8, 128)}, TernaryFormat())
    assert weights.dtype("blk.0.attn_q.weight") == "f32"


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"weight": np.zeros((2, 128), np.uint8)}, "FormatError", "weight_scale: missing"),
        (
            {"weight": np.full((2, 128), 3, np.uint8), "weight_scale": np.ones(1, np.float32)},
            "FormatError",
            "none of -1, 0, 1",
        ),
        (
            {"weight": np.zeros((2, 100), np.uint8), "weight_scale": np.ones(1, np.float32)},
            "UnsupportedError",
            "multiple of 128",
        ),
        (
            {"weight": np.zeros((2, 128), np.uint8), "weight_scale": np.zeros(1, np.float32)},
            "FormatError",
            "one finite number",
        ),
        (
            {"weight": np.zeros((2, 128), np.uint8), "weight_scale": np.ones(2, np.float32)},
            "FormatError",
            "one finite number",
        ),
        (
            {"weight": np.zeros((2, 128), np.uint8), "weight_scale": np.ones(1, np.int32)},
            "FormatError",
            "one finite number",
        ),
        (
            {"weight": np.full((2, 128), 0.5, np.float32), "weight_scale": np.ones(1, np.float32)},
            "FormatError",
            "expected -1, 0 and 1",
        ),
    ],
)
def test_broken_layers(tmp_path, tensors, error, message):
    named = {f"{MODULE}.{key}": value for key, value in tensors.items()}
    with pytest.raises(getattr(_core, error), match=message):
        load(tmp_path, named, TernaryFormat())


def test_master_weights_must_be_finite(tmp_path):
    with pytest.raises(_core.FormatError, match="finite"):
        load(
            tmp_path,
            {f"{MODULE}.weight": torch.full((2, 128), torch.inf)},
            TernaryFormat(online=True),
        )


def test_packed_weights_need_a_ternary_configuration(tmp_path):
    with pytest.raises(_core.UnsupportedError, match="U8"):
        load(tmp_path, {f"{MODULE}.weight": np.zeros((2, 128), np.uint8)}, None)


def test_format_of_a_configuration():
    quantization = {"quant_method": "bitnet", "modules_to_not_convert": None}

    def of(**more):
        return ternary_format({"quantization_config": {**quantization, **more}})

    assert ternary_format({}) is None
    assert of() == TernaryFormat(online=False, scale_divides=True)
    assert of(linear_class="autobitlinear") == TernaryFormat(online=False, scale_divides=False)
    online = of(linear_class="autobitlinear", quantization_mode="online")
    assert online == TernaryFormat(online=True, scale_divides=False)
    assert of(modules_to_not_convert=["a.b"]).excluded == ("a.b",)
    assert not of(modules_to_not_convert=["a.b"]).converts("a.b.c")
    assert of(modules_to_not_convert=["a.b"]).converts("a.bc")
    first = {"architectures": ["BitnetForCausalLM"]}
    assert ternary_format(first) == TernaryFormat(online=True)
    assert ternary_format({**first, "quantization_config": quantization}) == of()
    with pytest.raises(_core.UnsupportedError, match="gptq"):
        ternary_format({"quantization_config": {"quant_method": "gptq"}})


def test_names():
    block = "model.layers.3"
    assert (
        gguf_name(f"{block}.self_attn.attn_sub_norm.weight", "bitnet")
        == "blk.3.attn_sub_norm.weight"
    )
    assert (
        gguf_name(f"{block}.self_attn.inner_attn_ln.weight", "bitnet")
        == "blk.3.attn_sub_norm.weight"
    )
    assert gguf_name(f"{block}.mlp.ffn_layernorm.weight", "bitnet") == "blk.3.ffn_sub_norm.weight"
    assert gguf_name(f"{block}.mlp.up_proj.rms_norm.weight", "llama") == "blk.3.ffn_up.norm.weight"
    for other in (
        "mlp.other.rms_norm.weight",
        "mlp.up_proj.lora_a",
        "self_attn.q_proj.weight.x",
        "mlp.ffn_sub_norm.weight",
    ):
        with pytest.raises(_core.UnsupportedError, match="llama has no such weight"):
            gguf_name(f"{block}.{other}", "llama")
    assert gguf_name(f"{block}.self_attn.rotary_emb.inv_freq", "llama") is None
    assert gguf_name("vision_tower.encoder.layers.0.self_attn.q_proj.weight", "gemma3") is None


def test_a_norm_of_each_projection(tmp_path):
    """`use_rms_norm`: the norm is a node before the projection that it belongs to."""
    config = tiny.TERNARY_FAMILIES["llama_ternary"]
    config = {
        **config,
        "quantization_config": {**config["quantization_config"], "rms_norm_eps": 1e-3},
    }
    arrays = tiny.weights(config)
    arrays["model.layers.0.mlp.up_proj.rms_norm.weight"] = np.ones(256, np.float32)
    graph = open_model(tiny.write_folder(config, tmp_path, arrays)).graph
    norms = [n for n in graph.nodes if n["op"] == "rms_norm"]
    (own,) = [n for n in norms if n["attributes"]["eps"] == 1e-3]
    (user,) = [n for n in graph.nodes if own["outputs"][0] in n["inputs"]]
    assert user["op"] == "ternary_linear"
    assert len(norms) == 2 * config["num_hidden_layers"] + 2
