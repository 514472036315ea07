"""Configurations and graphs from GGUF files and from Hugging Face folders are the same."""

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from effinfer import LLM, _core
from effinfer.checkpoints.model_files import open_model
from effinfer.models.config import ModelConfig
from effinfer.models.gguf_config import config_from_gguf
from effinfer.models.hf_config import config_from_hf
from tests.model_files import gemma3_path, smollm2_path
from tests.reference import tiny


def gguf_config(config: tiny.Config, **changes: Any) -> ModelConfig:
    name = tiny.architecture(config)
    metadata = {f"{name}.{key}": value for key, value in tiny.gguf_metadata(config).items()}
    metadata["general.architecture"] = name
    metadata.update(changes)
    tied = config["tie_word_embeddings"]
    return config_from_gguf(
        metadata, vocab_size=tiny.VOCAB_SIZE, tied_head=tied, eos_token_ids=[tiny.EOS]
    )


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_both_forms_give_one_configuration(name):
    config = tiny.FAMILIES[name]
    of_gguf = gguf_config(config)
    of_folder = config_from_hf(config, eos_token_ids=[tiny.EOS])
    # The two forms pair dimensions differently, and GGUF has llama3 scaling as a tensor.
    of_gguf = dataclasses.replace(of_gguf, rope_interleaved=False)
    if of_folder.rope.scaling == "llama3":
        assert of_gguf.rope.scaling == "none"
        of_gguf = dataclasses.replace(of_gguf, rope=of_folder.rope)
    assert of_gguf == of_folder


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_both_forms_give_graphs_of_the_same_operators(name, tmp_path):
    config = tiny.FAMILIES[name]
    of_gguf = open_model(tiny.write_gguf(config, tmp_path / "tiny.gguf"))
    of_folder = open_model(tiny.write_folder(config, tmp_path / "folder"))
    assert [node["op"] for node in of_gguf.graph.nodes] == [
        node["op"] for node in of_folder.graph.nodes
    ]
    facts = dict(of_gguf.graph.metadata)
    assert facts == of_folder.graph.metadata
    assert facts["vocab_size"] == tiny.VOCAB_SIZE
    assert facts["eos_token_ids"] == [tiny.EOS]
    ids = of_gguf.tokenizer().encode("the thing")
    assert ids == of_folder.tokenizer().encode("the thing")


def attentions(graph: _core.Graph) -> list[dict[str, Any]]:
    return [node["attributes"] for node in graph.nodes if node["op"] == "attention"]


def test_smollm2():
    files = open_model(smollm2_path())
    assert files.graph.metadata["eos_token_ids"] == [0, 2]
    assert files.graph.metadata["context_length"] == 8192
    assert len(attentions(files.graph)) == 30
    assert all(a["window_left"] == -1 for a in attentions(files.graph))
    assert _core.Graph.parse(files.graph.to_string()) == files.graph


def test_gemma3():
    files = open_model(gemma3_path())
    assert files.graph.metadata["eos_token_ids"] == [1, 106]
    # A window of 512 tokens: the row's own and 511 before it.
    windows = [a["window_left"] for a in attentions(files.graph)]
    assert windows == ([511] * 5 + [-1]) * 3
    tables = [n["attributes"] for n in files.graph.nodes if n["op"] == "rope_table"]
    assert sorted(table["theta"] for table in tables) == [1e4, 1e6]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("none", 5e5, 1.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", 1e4, 2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, ("linear", 1e4, 8.0)),
    ],
)
def test_old_and_new_spellings_of_rope(changes, expected):
    rope = config_from_hf({**tiny.FAMILIES["llama_tied"], **changes}, eos_token_ids=[]).rope
    assert (rope.scaling, rope.theta, rope.factor) == expected


def test_rope_by_layer_type():
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = config_from_hf(
        {**tiny.FAMILIES["gemma3"], "rope_parameters": parameters}, eos_token_ids=[]
    )
    assert (config.rope.scaling, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert config.rope_local is not None
    assert (config.rope_local.scaling, config.rope_local.theta) == ("none", 2e4)


def test_multimodal_folders_use_their_text_model():
    text = {k: v for k, v in tiny.FAMILIES["gemma3"].items() if k != "model_type"}
    nested = {"model_type": "gemma3", "text_config": text}
    assert config_from_hf(nested, eos_token_ids=[]) == config_from_hf(
        tiny.FAMILIES["gemma3"], eos_token_ids=[]
    )


def test_layer_types_say_which_layers_slide():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {**tiny.FAMILIES["mistral"], "layer_types": types}
    assert config_from_hf(config, eos_token_ids=[]).sliding_layers == (True, False, True)
    with pytest.raises(_core.FormatError, match="layer_types"):
        config_from_hf({**config, "layer_types": types[:2]}, eos_token_ids=[])


def test_qwen_slides_only_when_told_to():
    base = {**tiny.FAMILIES["qwen2"], "sliding_window": 8, "max_window_layers": 2}
    assert config_from_hf(base, eos_token_ids=[]).sliding_layers == ()
    sliding = config_from_hf({**base, "use_sliding_window": True}, eos_token_ids=[])
    assert sliding.sliding_layers == (False, False, True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "mamba"}, "UnsupportedError", "mamba"),
        ({"hidden_size": None}, "FormatError", "hidden_size"),
        ({"hidden_act": "relu"}, "UnsupportedError", "relu"),
        ({"rope_scaling": {"type": "longrope"}}, "UnsupportedError", "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "FormatError", "factor"),
    ],
)
def test_folders_that_no_definition_covers(changes, error, message):
    with pytest.raises(getattr(_core, error), match=message):
        config_from_hf({**tiny.FAMILIES["llama"], **changes}, eos_token_ids=[])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general.architecture": "mamba"}, "UnsupportedError", "mamba"),
        ({"llama.block_count": None}, "FormatError", "block_count"),
        ({"llama.attention.value_length": 8}, "UnsupportedError", "value_length"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "UnsupportedError",
            "longrope",
        ),
    ],
)
def test_files_that_no_definition_covers(changes, error, message):
    with pytest.raises(getattr(_core, error), match=message):
        gguf_config(tiny.FAMILIES["llama"], **changes)


def test_a_folder_without_weights_or_config(tmp_path):
    with pytest.raises(_core.FileError, match=r"config\.json"):
        open_model(tmp_path)
    folder = tiny.write_folder(tiny.FAMILIES["llama"], tmp_path / "folder")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(_core.FormatError, match=r"model\.safetensors"):
        open_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(_core.FileError, match="safetensors"):
        open_model(folder)


def test_safetensors_is_optional(tmp_path, monkeypatch):
    folder = tiny.write_folder(tiny.FAMILIES["llama"], tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(_core.UnsupportedError, match=r"effinfer\[safetensors\]"):
        open_model(folder)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_shards_and_16_bit_weights(family, dtype, name, tmp_path):
    config = tiny.FAMILIES[family]
    folder = tiny.write_folder(config, tmp_path)
    (folder / "model.safetensors").unlink()
    arrays = {key: torch.tensor(value).to(dtype) for key, value in tiny.weights(config).items()}
    shards = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for number, (key, value) in enumerate(arrays.items()):
        shards[f"model-{number % 2 + 1}.safetensors"][key] = value
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    index = {key: shard for shard, tensors in shards.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    weights = open_model(folder).weights
    assert weights.dtype("blk.0.attn_q.weight") == name
    assert weights.dtype("blk.0.attn_norm.weight") == "f32"
    # The same values in float32 and in one file give the same logits.
    model = LLM(folder, precision="f32")
    exact = {key: value.float().numpy() for key, value in arrays.items()}
    save_file({k: torch.tensor(v) for k, v in exact.items()}, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    for shard in shards:
        (folder / shard).unlink()
    np.testing.assert_array_equal(
        model.logits(tiny.TOKEN_IDS), LLM(folder, precision="f32").logits(tiny.TOKEN_IDS)
    )


def test_an_index_may_not_leave_its_folder(tmp_path):
    folder = tiny.write_folder(tiny.FAMILIES["llama"], tmp_path)
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(_core.FormatError, match="weight_map"):
        open_model(folder)
