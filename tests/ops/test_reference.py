"""The reference itself, against torch."""

import numpy as np
import pytest
import torch

from tests.ops.reference import attend, rotate, seen, slopes


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs(kv_heads, causal):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((7, 6, 16))
    k, v = rng.standard_normal((2, 19, kv_heads, 16))
    mask = seen(7, 19, causal, 11)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v)),
        attn_mask=torch.from_numpy(mask),
        enable_gqa=True,
    )
    got = attend(q, k, v, mask)
    np.testing.assert_allclose(got.out, expected[0].transpose(0, 1).numpy(), atol=1e-12)
    scores = np.einsum("nhd,mhd->nhm", q, np.repeat(k, 6 // kv_heads, 1)) / 4
    scores = torch.from_numpy(np.where(mask[:, None], scores, -np.inf))
    np.testing.assert_allclose(got.lse, torch.logsumexp(scores, -1).numpy(), atol=1e-12)


def test_rows_without_keys():
    q, k = np.ones((3, 1, 4)), np.ones((2, 1, 4))
    got = attend(q, k, k, seen(3, 2, causal=True))
    np.testing.assert_array_equal(got.out[:, 0, 0], [0, 1, 1])
    assert np.isneginf(got.lse[0, 0])


def test_slopes():
    np.testing.assert_allclose(slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])


def test_rotation_keeps_relative_positions():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 8))
    products = [
        (rotate(q, np.array([i]), 1e4, 2.0) * rotate(k, np.array([j]), 1e4, 2.0)).sum()
        for i, j in [(5, 3), (105, 103)]
    ]
    np.testing.assert_allclose(products[0], products[1])
