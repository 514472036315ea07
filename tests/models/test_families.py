"""Every architecture on a tiny random model: as a GGUF file and as a Hugging Face folder."""

from pathlib import Path

import numpy as np
import pytest

import effinfer
from tests.reference import tiny
from tests.reference.decoder import Decoder


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_file_and_folder_give_the_reference_s_logits(name: str, tmp_path: Path) -> None:
    config = tiny.FAMILIES[name]
    path = tiny.write_gguf(config, tmp_path / "tiny.gguf")
    folder = tiny.write_folder(config, tmp_path / "folder")
    expected = Decoder.from_gguf(path).logits(tiny.TOKEN_IDS).numpy()
    from_file = effinfer.LLM(str(path), precision="f32").logits(tiny.TOKEN_IDS)
    from_folder = effinfer.LLM(str(folder), precision="f32").logits(tiny.TOKEN_IDS)
    assert from_file.shape == expected.shape == (len(tiny.TOKEN_IDS), tiny.VOCAB_SIZE)
    # float32 sums of a hundred terms through a few layers: some dozens of epsilons.
    epsilon = np.finfo(np.float32).eps
    assert relative_error(from_file, expected) < 64 * epsilon
    assert relative_error(from_folder, expected) < 64 * epsilon
    assert relative_error(from_folder, from_file) < 64 * epsilon


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_fast_path_stays_near(name: str, tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.FAMILIES[name], tmp_path / "tiny.gguf")
    expected = Decoder.from_gguf(path).logits(tiny.TOKEN_IDS).numpy()
    llm = effinfer.LLM(str(path))
    # bf16 keys and values, and bf16 or 8-bit activations: a relative step of 2^-8 each.
    assert relative_error(llm.logits(tiny.TOKEN_IDS), expected) < 0.05
    assert relative_error(llm.logits(tiny.TOKEN_IDS, phase="decode"), expected) < 0.05
