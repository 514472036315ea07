"""GEAR on SmolLM2, beside KIVI, whose codes it has, and beside 4 bits whose ranges are of a token's
keys as of its values. What is lost is the divergence from the texts that 16 bits give."""

import math
from pydoc_data import topics
from typing import Any

import numpy as np
import pytest
import torch

import effinfer
from effinfer import LLM
from effinfer.techniques import GEAR, KIVI
from tests.model_files import smollm2_path
from tests.reference.decoder import Decoder, rope_tables, rotate

PAGE = 64


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics)[:4])
    return LLM(smollm2_path()).tokenize(text)[:256]


def lost(dense: np.ndarray, rows: np.ndarray) -> float:
    """Of log-probabilities, behind the first page."""
    return float(np.mean(np.sum(np.exp(dense) * (dense - rows), axis=1)[PAGE:]))


def in_engine(techniques: list[Any], tokens: list[int]) -> np.ndarray:
    """Log-probabilities of tokens that are fed one by one, without int8's own noise."""
    llm = LLM(smollm2_path(), techniques=techniques, precision="f32")
    logits = torch.from_numpy(np.asarray(llm.engine.logits(tokens, phase="decode")))
    return logits.double().log_softmax(-1).numpy()


class PlainInt4(Decoder):
    """Rows read whole pages of 64 tokens behind them in 4 bits, with a range a token and head."""

    def attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        config, count, block = self.config, x.shape[0], f"blk.{layer}"
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = (
            self.linear(x, f"{block}.attn_{name}").view(count, number, config.head_dim)
            for name, number in zip("qkv", heads, strict=True)
        )
        tables = rope_tables(config.rope, count, None)
        q, k = rotate(q, tables, config.rope), rotate(k, tables, config.rope)
        group = config.num_heads // config.num_kv_heads
        exact = [each.repeat_interleave(group, 1) for each in (k, v)]
        rounded = [round_to_4_bits(each) for each in exact]
        place = torch.arange(count)
        hidden = place[None] > place[:, None]
        encoded = place[None] < place[:, None] // PAGE * PAGE
        scores = [torch.einsum("qhd,khd->hqk", q, keys) for keys in (exact[0], rounded[0])]
        mixed = torch.where(encoded, scores[1], scores[0]) * config.head_dim**-0.5
        weights = mixed.masked_fill(hidden, -math.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights * encoded, rounded[1])
        out = out + torch.einsum("hqk,khd->qhd", weights * ~encoded, exact[1])
        return self.linear(out.reshape(count, -1), f"{block}.attn_output")


def round_to_4_bits(x: torch.Tensor) -> torch.Tensor:
    least = x.amin(-1, keepdim=True).half().float()
    step = ((x.amax(-1, keepdim=True) - least) / 15).half().float()
    return least + step * ((x - least) / step).round().clamp(0, 15)


@pytest.fixture(scope="module")
def plain_int4(tokens) -> float:
    exact = Decoder.from_gguf(smollm2_path())
    rounded = PlainInt4(exact.config, exact.weights)
    rows = [each.logits(tokens).double().log_softmax(-1).numpy() for each in (exact, rounded)]
    return lost(*rows)


def bytes_of(technique: KIVI | GEAR) -> float:
    """Of encoded pages, by those of 16 bits."""
    llm = LLM(smollm2_path(), techniques=[technique], prefix_cache=False)
    params = effinfer.SamplingParams(max_tokens=3, ignore_eos=True)
    llm.engine.add([7] * (4 * PAGE), params.to_core())
    used = []
    while llm.engine.has_work():
        llm.engine.step()
        used.append(llm.engine.kv_cache.used_bytes)
    page = used[0] / 4  # before the prompt's are encoded
    return (used[1] - page) / (4 * page)


def test_it_loses_a_third_of_plain_int4_in_a_tenth_more_bytes(tokens, plain_int4):
    dense = in_engine([], tokens)
    kivi, gear = KIVI(bits=4, residual=0), GEAR(bits=4, rank=0, outliers=48, residual=0)
    loses = {each.name: lost(dense, in_engine([each], tokens)) for each in (kivi, gear)}
    assert 0 < loses["gear"] < 0.9 * loses["kivi"]
    assert loses["gear"] < plain_int4 / 3
    size = bytes_of(kivi)
    assert size == pytest.approx(0.28125)  # plain int4's, whose keys have a range a token
    assert size < bytes_of(gear) < 1.1 * size


def test_what_no_page_holds_is_refused():
    with pytest.raises(effinfer.InvalidArgumentError, match="rank"):
        GEAR(rank=17)
    with pytest.raises(effinfer.InvalidArgumentError, match="outliers"):
        GEAR(outliers=257)
    with pytest.raises(effinfer.ConflictError, match=r"kv\.format"):
        LLM(smollm2_path(), techniques=[GEAR(), KIVI()])
