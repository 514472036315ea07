"""For each technique of the contract: parameters with which it does something to a tiny model; and
of each family that drafts, one that needs no second model."""

from typing import Any

import numpy as np

from effinfer.techniques import (
    CSKV,
    GEAR,
    H2O,
    KIVI,
    XKV,
    ActQKV,
    AttentionPredictor,
    Chelsea,
    CommVQ,
    DoubleSparsity,
    HyperAttention,
    InfLLMV2,
    Keyformer,
    KVCompose,
    MagicPIG,
    MInference,
    Quest,
    Qwen1M,
    RaaS,
    S2Attention,
    SampleAttention,
    SnapKV,
    SqueezedAttention,
    StreamingLLM,
    StreamingVLM,
    SubGen,
    SuffixDecoding,
    Technique,
    TokenButler,
    TokenSelect,
    WindowKV,
    XAttention,
    ZeroTuning,
)
from effinfer.techniques.channel_basis import pack
from tests.techniques.predictor_file import network_of_the_contract, predictor_of_the_contract


def random_basis(features: int, channels: int) -> tuple[int, ...]:
    """Of three layers' keys and values."""
    random = np.random.default_rng(5)
    rows = [np.linalg.qr(random.normal(size=(channels, features)))[0].T for _ in range(3 * 2)]
    return pack(np.stack(rows))


def random_codebooks() -> tuple[int, ...]:
    """Of three layers' keys and values, two heads with 16 dimensions."""
    return pack(np.random.default_rng(6).normal(size=(3 * 2 * 2 * 4, 256, 4)))


CASES: dict[str, Technique] = {
    "act_qkv": ActQKV(
        budget=320, min_tokens=0, skip_layers=0, spread=(3.0, 1.0, 2.0), chunk_tokens=128
    ),
    "attention_predictor": AttentionPredictor(
        budget=256, min_tokens=0, skip_layers=0, every=5, path=network_of_the_contract()
    ),
    "chelsea": Chelsea(budget=150, sinks=2, recent=20, stride=30, chunk=16, chunk_tokens=128),
    "comm_vq": CommVQ(residual=100, codebooks=random_codebooks()),
    "cskv": CSKV(features=16, residual=50, basis=random_basis(16, 32)),
    "double_sparsity": DoubleSparsity(
        budget=200, min_tokens=0, skip_layers=0, channels=2, labels=(0, 1, 6, 7) * 3
    ),
    "gear": GEAR(bits=2, rank=2, outliers=12, residual=16),
    "h2o": H2O(budget=150, recent=40, stride=50, chunk_tokens=128),
    "hyper_attention": HyperAttention(
        keys=40, samples=20, bits=4, min_tokens=0, local_tokens=10, chunk_tokens=128
    ),
    "infllm_v2": InfLLMV2(budget=256, local=64, min_tokens=0, skip_layers=0),
    "keyformer": Keyformer(
        budget=150, recent=40, stride=50, chunk_tokens=128, temperature=1.5, noise=0.8
    ),
    "kivi": KIVI(bits=2, residual=16),
    "kv_compose": KVCompose(budget=100, window=20, chunk_tokens=128),
    "magic_pig": MagicPIG(
        bits=2, tables=8, min_tokens=0, skip_layers=0, means=tuple(range(-48, 48))
    ),
    "kv_compose_by_layer": KVCompose(budget=150, window=20, chunk_tokens=128, layer_budgets=True),
    "minference": MInference(
        min_tokens=0,
        vertical_size=4,
        slash_size=3,
        local_tokens=10,
        sink_tokens=2,
        chunk_tokens=128,
    ),
    "quest": Quest(budget=256, min_tokens=0, skip_layers=1),
    "qwen_1m": Qwen1M(chunk=256, context=270),
    "raas": RaaS(budget=8, stride=4, alpha=0.02, chunk_tokens=128),
    "s2_attention": S2Attention(stride=4, local_tokens=64, dense_layers=(1,), chunk_tokens=128),
    "sample_attention": SampleAttention(min_tokens=0, mass=0.3, local_tokens=10, chunk_tokens=128),
    "snapkv": SnapKV(budget=100, window=20, pool=5, chunk_tokens=128),
    "squeezed_attention": SqueezedAttention(budget=256, min_tokens=0, skip_layers=0, context=200),
    "streaming_llm": StreamingLLM(sinks=2, recent=230, stride=100, chunk_tokens=128),
    "streaming_vlm": StreamingVLM(
        sinks=2, text=100, images=40, image_tokens=tuple(range(60)), chunk_tokens=128
    ),
    "subgen": SubGen(budget=150, recent=20, stride=30, chunk_tokens=128),
    "token_butler": TokenButler(
        budget=200, min_tokens=0, skip_layers=0, path=predictor_of_the_contract()
    ),
    "token_select": TokenSelect(
        budget=200, min_tokens=0, skip_layers=0, reuse=0.05, reuse_layers=2
    ),
    "window_kv": WindowKV(budget=100, window=20, span=6, group=2, chunk_tokens=128),
    "xattention": XAttention(min_tokens=0, threshold=0.5, stride=4, chunk_tokens=128),
    "xkv": XKV(layers=2, features=32, residual=50, basis=random_basis(32, 32)),
    "zero_tuning": ZeroTuning(percent=20),
}

DRAFTERS: dict[str, Any] = {"speculation.lookup": SuffixDecoding()}
