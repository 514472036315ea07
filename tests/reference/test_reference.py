"""The reference decoders themselves, against numbers that transformers computed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reference import tiny
from tests.reference.decoder import Decoder
from tests.reference.metrics import compare, top2_gap

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "tiny_logits.json").read_text())


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_decoder_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.FAMILIES[name], tmp_path / "tiny.gguf")
    logits = Decoder.from_gguf(path).logits(tiny.TOKEN_IDS)
    actual = logits[EXPECTED["rows"]][:, :: EXPECTED["column_step"]].numpy()
    expected = np.array(EXPECTED["logits"][name])
    assert expected.std() > 0.5
    # The table holds five decimals; float32 sums in another order differ by less than that.
    np.testing.assert_allclose(actual, expected, atol=5e-5 + 2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", tiny.TERNARY_FAMILIES)
def test_ternary_decoder_agrees_with_transformers(name: str) -> None:
    """Until an activation on the edge between two steps of int8 is rounded the other way: then by
    the noise of such a step."""
    logits = tiny.ternary_decoder(name).logits(tiny.TOKEN_IDS)
    actual = logits[EXPECTED["rows"]][:, :: EXPECTED["column_step"]].numpy()
    expected = np.array(EXPECTED["logits"][name])
    assert expected.std() > 0.5
    errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert (errors < 2e-5).sum() >= 2
    assert errors.max() < 0.05


def test_divergence_of_known_distributions() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    other = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
    fidelity = compare(lambda rows: reference[rows], lambda rows: other[rows], [0, 1])
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert fidelity.kl_max == pytest.approx(expected, rel=1e-5)
    assert fidelity.kl_mean == pytest.approx(expected / 2, rel=1e-5)
    assert fidelity.reference_perplexity == pytest.approx(2.0, rel=1e-5)
    assert fidelity.perplexity == pytest.approx(1 / 0.75, rel=1e-5)


def test_top2_gap() -> None:
    gap = top2_gap(torch.tensor([[1.0, 3.0, 2.5], [0.0, -1.0, -4.0]]))
    assert gap.tolist() == [0.5, 1.0]
