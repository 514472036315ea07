"""Dual chunk attention against torch in float32: at which distances rows see keys, in prompts, in
generated tokens and with drafts; and what it is refused beside."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import effinfer
from effinfer import SamplingParams, Speculation
from effinfer.checkpoints.model_files import open_model
from effinfer.techniques import MInference, Quest, Qwen1M, StreamingLLM, SuffixDecoding
from effinfer.techniques.rewrite import rewrite
from tests.model_files import smollm2_path
from tests.reference import tiny
from tests.reference.decoder import Decoder, load_gguf, rope_tables, rotate

CONTEXT, CHUNK, LENGTH = 320, 256, 600
METHOD = Qwen1M(chunk=CHUNK, factor=3)


class Chunked(Decoder):
    """Keys at their places in chunks, and a query of its own for each distance in chunks."""

    def attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        config, tokens, block = self.config, x.shape[0], f"blk.{layer}"
        group = config.num_heads // config.num_kv_heads

        def heads(name: str, count: int) -> torch.Tensor:
            return self.linear(x, f"{block}.{name}").view(tokens, count, config.head_dim)

        q = heads("attn_q", config.num_heads)
        k, v = heads("attn_k", config.num_kv_heads), heads("attn_v", config.num_kv_heads)
        tables = rope_tables(config.rope, 2 * CHUNK, self.weights.get("rope_freqs.weight"))

        def turned(what: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return rotate(what, (tables[0][places], tables[1][places]), config.rope)

        position = torch.arange(tokens)
        place = position % CHUNK
        last = torch.tensor(CONTEXT - 1)
        k = turned(k, place).repeat_interleave(group, 1)
        back = (position[:, None] // CHUNK - position[None, :] // CHUNK).clamp(max=2)
        scores = torch.zeros(config.num_heads, tokens, tokens)
        of_queries = (place, torch.minimum(place + CHUNK, last), last.expand(tokens))
        for distance, places in enumerate(of_queries):
            products = torch.einsum("qhd,khd->hqk", turned(q, places), k)
            scores += products * (back == distance)
        ratio = ((position + 1) / CONTEXT).clamp(min=1)
        scores *= config.head_dim**-0.5 * ((0.1 * ratio.log() + 1) ** 2)[:, None]
        p = scores.masked_fill(self.unseen(tokens, layer), -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1))
        return self.linear(mixed.reshape(tokens, -1), f"{block}.attn_output")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**tiny.FAMILIES["llama"], "max_position_embeddings": CONTEXT}
    return tiny.write_gguf(config, tmp_path_factory.mktemp("models") / "tiny.gguf")


def load(path: Any, *methods: Any, **options: Any) -> effinfer.LLM:
    return effinfer.LLM(path, techniques=list(methods), threads=1, **options)


def some_tokens(count: int) -> list[int]:
    return np.random.default_rng(4).integers(0, 200, count).tolist()


def losses(path: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the reference, and of the model as it is."""
    config, weights = load_gguf(path)
    place = torch.arange(len(tokens) - 1), tokens[1:]
    chunked, plain = (kind(config, weights).logits(tokens) for kind in (Chunked, Decoder))
    return chunked.log_softmax(-1)[place], plain.log_softmax(-1)[place]


def test_rows_see_keys_at_the_distances_of_chunks(path, isa):
    tokens = some_tokens(LENGTH)
    expected, plain = losses(path, tokens)
    llm = load(path, METHOD, precision="f32", kv_dtype="f32", max_batch_tokens=200)
    actual = torch.from_numpy(llm.log_likelihoods(tokens)).float()
    assert (actual - expected).abs().max() < 1e-3
    assert (expected - plain)[:CHUNK].abs().max() < 1e-3 < (expected - plain).abs().max()


def test_so_do_generated_tokens(path):
    """Token by token with the bits of a prompt, where both have one arithmetic."""
    tokens = some_tokens(LENGTH)
    llm = load(path, METHOD, precision="f32", max_batch_tokens=200)
    np.testing.assert_array_equal(
        llm.log_likelihoods(tokens, phase="decode"), llm.log_likelihoods(tokens)
    )


def test_short_texts_keep_the_bits_of_the_model(path):
    tokens = some_tokens(CHUNK)
    np.testing.assert_array_equal(load(path, METHOD).logits(tokens), load(path).logits(tokens))


def test_texts_become_longer_than_the_context(path):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [some_tokens(size) for size in (CONTEXT + 190, 230)]
    llm = load(path, METHOD)
    assert llm.engine.max_seq_len == 3 * CONTEXT
    with pytest.raises(effinfer.InvalidArgumentError):
        load(path).generate([prompts[0]], params)
    expected = [load(path, METHOD).generate([each], params)[0].token_ids for each in prompts]
    assert [output.token_ids for output in llm.generate(prompts, params)] == expected


def test_drafts_across_the_ends_of_chunks_change_no_text(path):
    """Prompts that repeat themselves, so that drafts are accepted where a chunk ends."""
    prompts = [some_tokens(40) * 6 + some_tokens(first) for first in (2, 9, 15)]
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    expected = [output.token_ids for output in load(path, METHOD).generate(prompts, params)]
    llm = load(path, METHOD, speculation=Speculation([SuffixDecoding()], controller=8))
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.metrics.speculation.accepted for output in outputs) > 0


@pytest.mark.parametrize("other", [MInference(), Quest(), StreamingLLM()])
def test_who_chooses_or_drops_keys_is_refused_beside_it(path, other):
    with pytest.raises(effinfer.ConflictError, match="qwen_1m"):
        load(path, METHOD, other)


def test_keys_stay_in_their_slots(path):
    cache = load(path, METHOD).engine.kv_cache
    sequence, _ = cache.create([1, 2, 3])
    cache.append(sequence, [1, 2, 3])
    cache.commit(sequence, 3)
    for change in (
        lambda: cache.retain(sequence, [[0, 2]]),
        lambda: cache.evict(sequence, 0, 1),
        lambda: cache.reposition(sequence, [0], 1),
    ):
        with pytest.raises(effinfer.UnsupportedError, match="stay in their slots"):
            change()


def test_bad_input(path):
    with pytest.raises(effinfer.InvalidArgumentError, match="multiple of 256"):
        load(path, Qwen1M(chunk=300))
    graph = open_model(path).graph
    bare = rewrite(graph, lambda _, node, inputs: inputs[0] if node["op"] == "rope" else None)
    with pytest.raises(effinfer.UnsupportedError, match="expected rope"):
        Qwen1M().graph(bare)


def test_smollm2_reads_what_lies_far_back():
    """As if its context were less than half of the text: nearly as well as at the distances that
    the text has, which it was trained for."""
    text = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    perplexities = []
    for methods in ([Qwen1M(context=320)], []):
        llm = effinfer.LLM(smollm2_path(), techniques=methods, max_seq_len=1024)
        tokens = llm.tokenizer.encode(text)[:800]
        perplexities.append(np.exp(-np.mean(llm.log_likelihoods(tokens))))
    assert perplexities[0] <= 1.15 * perplexities[1]
