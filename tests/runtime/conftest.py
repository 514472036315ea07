"""Fixtures of this folder."""

import pytest

from effinfer.checkpoints.model_files import ModelFiles, open_model
from tests.reference import tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFiles]:
    """Tiny models with random weights, by family; two of them have windows."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: open_model(tiny.write_gguf(tiny.FAMILIES[name], folder / f"{name}.gguf"))
        for name in ("llama", "gemma3", "mistral")
    }
