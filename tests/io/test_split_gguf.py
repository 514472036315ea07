"""Models in several GGUF files, as the gguf package splits them."""

import numpy as np
import pytest

from effinfer import LLM, _core, quantize
from tests.reference import tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model whole, and the first file of the same one split."""
    folder = tmp_path_factory.mktemp("split")
    config = tiny.FAMILIES["llama"]
    whole = tiny.write_gguf(config, folder / "whole.gguf")
    split = tiny.write_gguf(config, folder / "split.gguf", split_tensors=7)
    assert len(list(folder.glob("split-*.gguf"))) == 5  # the metadata, and four times tensors
    return whole, split


def test_the_tensors_are_those_of_the_whole(files):
    whole, split = (_core.GgufFile(str(path)) for path in files)
    assert [t.name for t in split.tensors()] == [t.name for t in whole.tensors()]
    for tensor in whole.tensors():
        assert np.array_equal(split.tensor_bytes(tensor.name), whole.tensor_bytes(tensor.name))


@pytest.mark.parametrize("pack_cache", [False, True])
def test_the_model_says_the_same(files, tmp_path, pack_cache):
    texts = []
    for path in files:
        for _ in range(2):  # the second load finds a pack cache
            with LLM(path, pack_cache=tmp_path / path.stem if pack_cache else False) as llm:
                (out,) = llm.generate("the", temperature=0, max_tokens=12, ignore_eos=True)
                texts.append(out.token_ids)
                state = llm.engine.pack_cache.state
        assert state == ("hit" if pack_cache else "off")
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_quantize_makes_one_file(files, tmp_path):
    whole, split = files
    made = [quantize(path, tmp_path / f"{path.stem}.gguf", "q8_0").path for path in (whole, split)]
    assert made[0].read_bytes() == made[1].read_bytes()


def test_quantize_replaces_no_file_of_its_model(files):
    _, split = files
    later = split.with_name(split.name.replace("00001", "00003"))
    before = later.read_bytes()
    with pytest.raises(_core.InvalidArgumentError, match="another file than the model"):
        quantize(split, later, "q8_0")
    assert later.read_bytes() == before


def test_a_later_file_names_the_first(files):
    _, split = files
    with pytest.raises(_core.FormatError, match="expected the first.*00001-of-00005"):
        LLM(split.with_name(split.name.replace("00001", "00003")))


def test_a_missing_file_is_named(files, tmp_path):
    _, split = files
    copy = tmp_path / split.name
    copy.write_bytes(split.read_bytes())
    with pytest.raises(_core.FileError, match="00002-of-00005"):
        LLM(copy)
