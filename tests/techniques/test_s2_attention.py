"""S2-Attention against a float32 decoder whose mask is written down, and on a real model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import effinfer
from effinfer.techniques import Quest, S2Attention, XAttention
from tests.model_files import smollm2_path
from tests.reference import tiny
from tests.reference.decoder import Decoder, load_gguf
from tests.techniques.test_prefill import text

METHOD = S2Attention(stride=3, local_tokens=64, sink_tokens=2, dense_layers=(1,), chunk_tokens=128)
LENGTH = 700


class Sharded(Decoder):
    """Page p is for KV head h of a layer when p = h + the heads of the layers before, modulo the
    stride."""

    def unseen(self, tokens: int, layer: int) -> torch.Tensor:
        hidden = super().unseen(tokens, layer)
        if layer in METHOD.dense_layers:
            return hidden
        heads = self.config.num_kv_heads
        page = torch.arange(tokens) // 64
        nearest = page[:, None] - page[None, :] <= 1
        first = torch.arange(tokens) < METHOD.sink_tokens
        shard = (torch.arange(heads) + layer * heads) % METHOD.stride
        own = page % METHOD.stride == shard[:, None]
        visited = nearest | first | own[:, None]
        group = self.config.num_heads // heads
        return hidden | ~visited.repeat_interleave(group, 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**tiny.FAMILIES["llama"], "max_position_embeddings": 1024}
    return tiny.write_gguf(config, tmp_path_factory.mktemp("models") / "tiny.gguf")


def load(path: Any, *methods: Any, **options: Any) -> effinfer.LLM:
    return effinfer.LLM(path, techniques=list(methods), threads=1, **options)


def test_each_row_sees_its_heads_shards(path, isa):
    tokens = torch.randint(0, 200, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
    config, weights = load_gguf(path)
    llm = load(path, METHOD, precision="f32", kv_dtype="f32", max_batch_tokens=256)
    expected = Sharded(config, weights).logits(tokens)
    dense = Decoder(config, weights).logits(tokens)
    for phase in ("prefill", "decode"):
        actual = torch.from_numpy(llm.log_likelihoods(tokens, phase=phase)).float()
        wanted, others = (
            each.log_softmax(-1)[torch.arange(LENGTH - 1), tokens[1:]] for each in (expected, dense)
        )
        assert (actual - wanted).abs().max() < 1e-3
        assert (actual - others).abs().max() > 0.05


def test_text_stays_likely_with_a_third_of_the_keys():
    """Of a model that was not trained with it, whose first keys all heads see; behind 1,200 tokens
    a head visits 2 local pages and the row's own, and one of 6 of the others."""
    method = S2Attention(stride=6, local_tokens=128)
    options = {"max_seq_len": 1300, "max_batch_tokens": 600}
    plain, sharded = (load(smollm2_path(), *each, **options) for each in ((), (method,)))
    tokens = text(plain)[:1200]
    dense, sparse = (
        float(llm.log_likelihoods(tokens, phase="decode")[-100:].mean()) for llm in (plain, sharded)
    )
    assert sparse != dense
    assert sparse > dense - 0.1


def test_it_chooses_alone():
    for other in (Quest(), XAttention()):
        with pytest.raises(effinfer.ConflictError, match="visits"):
            load(smollm2_path(), METHOD, other)


@pytest.mark.parametrize("layers", [(99,), (-1,), "ab", 1])
def test_unknown_layers_are_refused(layers):
    with pytest.raises(effinfer.InvalidArgumentError, match=r"dense_layers: .* 0 to 29, got"):
        load(smollm2_path(), S2Attention(dense_layers=layers))
