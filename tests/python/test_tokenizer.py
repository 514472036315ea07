"""Tokenizers from GGUF metadata, against ids that llama.cpp computed, and the stream decoder."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from effinfer import _core
from effinfer.text import tokenizer_gguf
from effinfer.text.tokenizer import Tokenizer
from tests.model_files import gemma3_path, smollm2_path

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "tokens.json").read_text())
PATHS = {"smollm2-135m": smollm2_path, "gemma3-270m": gemma3_path}


@pytest.fixture(scope="module", params=list(PATHS))
def model(request) -> tuple[str, Tokenizer]:
    return request.param, Tokenizer.from_gguf(_core.GgufFile(str(PATHS[request.param]())))


def test_ids_equal_those_of_llama_cpp(model):
    name, tokenizer = model
    for text, ids, plain in zip(
        EXPECTED["texts"],
        EXPECTED["models"][name]["ids"],
        EXPECTED["models"][name]["plain"],
        strict=True,
    ):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, parse_special=False) == plain, text


def test_long_texts_are_encoded_as_short_ones(model):
    _, tokenizer = model
    text = "".join(EXPECTED["texts"]) * 20
    assert len(text) > 4096
    assert tokenizer.encode(text, add_special=False) == tokenizer.backend.encode(text).ids
    assert not tokenizer.is_busy
    assert tokenizer.longest_token >= 16


def test_decoding_gives_the_text_back(model):
    _, tokenizer = model
    for text in EXPECTED["texts"]:
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        # Gemma's vocabulary spells a space as U+2581, so that character itself does not survive.
        back = tokenizer.decode(ids, skip_special=False)
        assert back in (text, text.replace("\u2581", " "))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stream_never_breaks_a_character(model, size):
    _, tokenizer = model
    for text in EXPECTED["texts"]:
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


def test_an_unfinished_character_comes_out_at_the_end(model):
    _, tokenizer = model
    ids = tokenizer.encode("\U000e0001", add_special=False)
    assert len(ids) > 1
    stream = tokenizer.stream()
    assert stream.push(ids[:-1]) == ""
    assert "\ufffd" in stream.finish()


def test_special_tokens_are_skipped_or_shown(model):
    _, tokenizer = model
    eos = tokenizer.eos_token_id
    ids = [*tokenizer.encode("x", add_special=False), eos]
    assert tokenizer.decode(ids) == "x"
    assert tokenizer.decode(ids, skip_special=False) == "x" + tokenizer.token(eos)


def test_a_spelled_out_bos_is_not_doubled():
    tokenizer = Tokenizer.from_gguf(_core.GgufFile(str(gemma3_path())))
    assert tokenizer.encode("<bos>x") == tokenizer.encode("x")


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_unknown_ids_are_refused(model, bad):
    with pytest.raises(_core.InvalidArgumentError, match=str(bad)):
        model[1].decode([1, bad])


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*alphabet, "th", "<end>"],
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": 257,
    }
    return {**metadata, **changes}


def spm_metadata(prefix: bool) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = ["▁", "a", "b", "ab", "▁a", "▁ab", "ba"]
    scores = [0.0] * len(pieces) + [-6.0, -6.1, -6.2, -1.0, -2.0, -3.0, -4.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("EFFINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def spell(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(i) for i in tokenizer.encode(text)]


def test_sentencepiece_merges_by_score(cache):
    tokenizer = Tokenizer.from_gguf(spm_metadata(prefix=True))
    # "ab" (-1) merges before "▁a" (-2) and "ba" (-4).
    assert spell(tokenizer, "ab") == ["<s>", "▁ab"]
    assert spell(tokenizer, "abab") == ["<s>", "▁ab", "ab"]
    assert spell(tokenizer, "aba b") == ["<s>", "▁ab", "a", "▁", "b"]
    assert spell(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" ab é")) == " ab é"
    assert spell(Tokenizer.from_gguf(spm_metadata(prefix=False)), "ab") == ["<s>", "ab"]


def test_merges_are_kept_in_the_cache_and_a_broken_one_is_made_anew(cache):
    first = spell(Tokenizer.from_gguf(spm_metadata(prefix=True)), "abab")
    (path,) = (cache / "tokenizers").iterdir()
    for content in (path.read_bytes(), b"", b"not numpy"):
        path.write_bytes(content)
        assert spell(Tokenizer.from_gguf(spm_metadata(prefix=True)), "abab") == first


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EFFINFER_CACHE", str(tmp_path / "file"))
    assert spell(Tokenizer.from_gguf(spm_metadata(prefix=True)), "ab") == ["<s>", "▁ab"]


def test_an_unknown_pre_tokenizer_warns():
    metadata = bpe_metadata(**{"tokenizer.ggml.pre": "of-tomorrow"})
    with pytest.warns(UserWarning, match="of-tomorrow"):
        tokenizer = Tokenizer.from_gguf(metadata)
    assert spell(tokenizer, "the") == ["th", "e"]


@pytest.mark.parametrize("family", sorted(tokenizer_gguf.PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(family):
    tokenizer = Tokenizer.from_gguf(bpe_metadata(**{"tokenizer.ggml.pre": family}))
    text = "It's 12345 o'clock, THE   End\r\n\tçà 日本 ..."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pre_tokenizers_cut_digits_as_their_models_do():
    def pieces(family: str) -> list[str]:
        backend = Tokenizer.from_gguf(bpe_metadata(**{"tokenizer.ggml.pre": family})).backend
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("12345")]

    assert pieces("gpt-2") == ["12345"]
    assert pieces("llama-bpe") == ["123", "45"]
    assert pieces("qwen2") == pieces("smollm") == list("12345")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokenizer.ggml.model": None}, "FormatError", "no tokenizer"),
        ({"tokenizer.ggml.model": "wordpiece"}, "UnsupportedError", "wordpiece"),
        ({"tokenizer.ggml.tokens": None}, "FormatError", "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "FormatError", "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["q nothere"]}, "FormatError", "nothere"),
        ({"tokenizer.ggml.merges": ["single"]}, "FormatError", "tokenizer"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "FormatError", "token_type"),
    ],
)
def test_broken_metadata_gives_typed_errors(changes, error, message):
    with pytest.raises(getattr(_core, error), match=message):
        Tokenizer.from_gguf(bpe_metadata(**changes))


def test_a_folder_brings_its_own_tokenizer(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_token_id == 2
    assert tokenizer.encode("ab<s>") == [0, 1, 2]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(_core.FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(_core.FileError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
