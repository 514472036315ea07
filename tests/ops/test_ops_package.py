"""effinfer.ops composed by hand: a small attention block against float64."""

import numpy as np

from effinfer import ops
from tests.tolerance import assert_close

TOKENS, HEADS, KV_HEADS, DIM = 70, 4, 2, 32
WIDTH = HEADS * DIM


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def i32(*values):
    return np.array(values, np.int32)


def reference(x, weights, norm):
    x = x.astype(np.float64)
    h = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * norm
    q, k, v = (h @ w.T.astype(np.float64) for w in weights[:3])
    angles = np.arange(TOKENS)[:, None] * 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
    turn = np.exp(1j * angles)[:, None]

    def rotate(heads):
        z = (heads[..., : DIM // 2] + 1j * heads[..., DIM // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    q = rotate(q.reshape(TOKENS, HEADS, DIM))
    k = np.repeat(rotate(k.reshape(TOKENS, KV_HEADS, DIM)), HEADS // KV_HEADS, axis=1)
    v = np.repeat(v.reshape(TOKENS, KV_HEADS, DIM), HEADS // KV_HEADS, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(DIM)
    scores[:, np.triu(np.ones((TOKENS, TOKENS), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v)
    return x + out.reshape(TOKENS, WIDTH) @ weights[3].T.astype(np.float64)


def test_attention_block(isa):
    x, norm = random(0, TOKENS, WIDTH), random(1, WIDTH)
    sizes = (WIDTH, KV_HEADS * DIM, KV_HEADS * DIM, WIDTH)
    weights = [random(2 + i, n, WIDTH) / np.float32(np.sqrt(WIDTH)) for i, n in enumerate(sizes)]
    packed = [ops.pack(w) for w in weights]
    h = ops.rmsnorm(x, norm)
    q, k, v = (ops.quantized_matmul(h, w, "f32").reshape(TOKENS, -1, DIM) for w in packed[:3])
    inv_freq, factor = ops.rope_frequencies(DIM)
    positions = np.arange(TOKENS, dtype=np.int32)
    table = ops.rope_table(positions, inv_freq, factor)
    kv = ops.PagedKv(3, KV_HEADS, DIM, "f32")
    batch = (i32(0, TOKENS), i32(0, 2), i32(2, 0), i32(TOKENS))
    roped = ops.rope_append(kv, q, k, v, table, *batch)
    rotated, keys = ops.apply_rope_pos_ids(q, k, positions)
    np.testing.assert_array_equal(roped, rotated)
    attended = ops.paged_attention(roped, kv, *batch)
    out = ops.quantized_matmul(attended.reshape(TOKENS, WIDTH), packed[3], "f32", residual=x)
    # Four operators in a row, each adding WIDTH products of values of the size of x's.
    magnitude = np.abs(x).max() * np.sqrt(WIDTH)
    assert_close(out, reference(x, weights, norm), terms=WIDTH, magnitude=magnitude)

    apart = ops.PagedKv(3, KV_HEADS, DIM, "f32")
    ops.kv_append(apart, keys, v, *batch)
    np.testing.assert_array_equal(ops.paged_attention(roped, apart, *batch), attended)
