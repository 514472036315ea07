"""Tokenizers from the metadata of a GGUF file.

`tokenizer.ggml.model` names the algorithm: "gpt2" is byte-level BPE with merges and a pre-tokeniser
named by `tokenizer.ggml.pre`; "llama" is SentencePiece BPE, where the score of a piece orders the
merges and unknown characters fall back to byte tokens.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from effinfer import _core
from effinfer.files.metadata import Metadata
from effinfer.files.paths import cache_dir

# tokenizer.json of the Hugging Face folder that a file was made from.
HF_TOKENIZER_KEY = "tokenizer.huggingface.json"

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"{_UPPER}*{_LOWER}+"
_CAPITAL = rf"{_UPPER}+{_LOWER}*"
_NOT_WORD = r"[^\r\n\p{L}\p{N}]?"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Regexes by the name of their family; each is a stage that splits the pieces of the stage before.
# The empty stage is GPT-2's own pattern, which the ByteLevel pre-tokeniser has built in.
GPT2 = ""
PATTERNS: dict[str, list[str]] = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [rf"{_CONTRACTIONS}|{_NOT_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"],
    "qwen2": [rf"{_CONTRACTIONS}|{_NOT_WORD}\p{{L}}+|\p{{N}}|{_TAIL}"],
    "tekken": [rf"{_NOT_WORD}{_CASED}|{_NOT_WORD}{_CAPITAL}|\p{{N}}|{_SLASH_TAIL}"],
    "gpt-4o": [
        rf"{_NOT_WORD}{_CASED}{_CONTRACTIONS}?|{_NOT_WORD}{_CAPITAL}{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
    ],
}
_FAMILIES = {
    "gpt-2": "gpt-2 default olmo mpt phi-2 jais gigachat roberta-bpe",
    "smollm": "smollm starcoder refact command-r codeshell exaone minerva-7b",
    "llama-bpe": "llama-bpe llama-v3 llama3 dbrx smaug-bpe falcon3 lfm2",
    "qwen2": "qwen2 stablelm2 deepseek-r1-qwen megrez",
    "tekken": "tekken",
    "gpt-4o": "gpt-4o llama4",
}
PRE_TOKENIZERS = {name: family for family, names in _FAMILIES.items() for name in names.split()}


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The `tokenizers.Tokenizer` that the metadata describes, without a post-processor: the caller
    adds BOS and EOS. Throws FormatError for missing keys, UnsupportedError for another algorithm.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise _core.FormatError("[tokenizer] tokenizer.ggml.model: the file holds no tokenizer")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise _core.UnsupportedError(
            f"[tokenizer] tokenizer.ggml.model: expected one of {sorted(builders)}, got {kind!r}"
        )
    tokens = list(_require(metadata, "tokenizer.ggml.tokens"))
    types = metadata.get("tokenizer.ggml.token_type")
    types = np.full(len(tokens), NORMAL) if types is None else np.asarray(types)
    if len(types) != len(tokens):
        raise _core.FormatError(
            f"[tokenizer] tokenizer.ggml.token_type: expected {len(tokens)} entries, "
            f"got {len(types)}"
        )
    try:
        tokenizer = builders[kind](metadata, tokens, types)
        _add_tokens(tokenizer, tokens, types)
    except _core.Error:
        raise
    except Exception as error:  # what the library raises for a broken vocabulary is a bare one
        raise _core.FormatError(f"[tokenizer] tokenizer.ggml.tokens: {error}") from error
    return tokenizer


def _require(metadata: Metadata, key: str) -> Any:
    value = metadata.get(key)
    if value is None:
        raise _core.FormatError(f"[tokenizer] {key}: missing from the file's metadata")
    return value


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Any) -> None:
    """Control tokens are special (skipped when decoding); user-defined ones are plain text that is
    never split. Both are matched before the BPE sees the text."""
    unknown = np.nonzero(types == UNKNOWN)[0].tolist()
    control = sorted(np.nonzero(types == CONTROL)[0].tolist() + unknown)
    user = np.nonzero(types == USER_DEFINED)[0].tolist()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in control if tokens[i]]
    )
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in user if tokens[i]])


def _byte_level_bpe(metadata: Metadata, tokens: list[str], types: Any) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in _require(metadata, "tokenizer.ggml.merges")]
    name = metadata.get("tokenizer.ggml.pre", "default")
    family = PRE_TOKENIZERS.get(name)
    if family is None:
        warnings.warn(
            f"tokenizer.ggml.pre: unknown pre-tokeniser {name!r}; using GPT-2's. Known: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}",
            stacklevel=2,
        )
        family = "gpt-2"
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 and Tekken take a whole piece that is in the vocabulary without merging.
    ignore = family in ("llama-bpe", "tekken", "gpt-4o")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore))
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    stages: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in PATTERNS[family]
        if pattern != GPT2
    ]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    uses_gpt2 = GPT2 in PATTERNS[family]
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=uses_gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: Metadata, tokens: list[str], types: Any) -> Tokenizer:
    scores = np.asarray(_require(metadata, "tokenizer.ggml.scores"), np.float32)
    if len(scores) != len(tokens):
        raise _core.FormatError(
            f"[tokenizer] tokenizer.ggml.scores: expected {len(tokens)} entries, got {len(scores)}"
        )
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    vocab = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=_cached_merges(tokens, scores, types, vocab),
        unk_token=tokens[unknown] if unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=bool((types == BYTE).any()),
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    )
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(stages + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _merges_of_scores(
    tokens: Sequence[str], scores: Any, types: Any, vocab: Mapping[str, int]
) -> Any:
    """int32 [n, 2]: every split of every normal piece into two pieces of the vocabulary, the
    pieces of the best scores first: the order in which SentencePiece would merge."""
    normal = np.nonzero(types == NORMAL)[0]
    normal = normal[np.argsort(-scores[normal], kind="stable")]
    pairs: list[int] = []
    for index in normal.tolist():
        piece = tokens[index]
        for cut in range(1, len(piece)):
            left = vocab.get(piece[:cut])
            if left is not None:
                right = vocab.get(piece[cut:])
                if right is not None:
                    pairs += (left, right)
    return np.array(pairs, np.int32).reshape(-1, 2)


def _cached_merges(
    tokens: Sequence[str], scores: Any, types: Any, vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges, kept in the user's cache by content: finding them takes most of the time that a
    vocabulary of 262k pieces needs. A cache that cannot be written is no error."""
    digest = hashlib.blake2b("\0".join(tokens).encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(np.ascontiguousarray(scores).tobytes())
    digest.update(np.ascontiguousarray(types).tobytes())
    path = cache_dir() / "tokenizers" / f"{digest.hexdigest()}.npy"
    pairs = _load_merges(path, len(tokens))
    if pairs is None:
        pairs = _merges_of_scores(tokens, scores, types, vocab)
        _save_merges(path, pairs)
    left, right = pairs.T.tolist() if len(pairs) else ([], [])
    return list(zip(map(tokens.__getitem__, left), map(tokens.__getitem__, right), strict=True))


def _load_merges(path: Path, vocab_size: int) -> Any:
    try:
        pairs = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    valid = pairs.ndim == 2 and pairs.shape[1] == 2 and pairs.dtype == np.int32
    if not valid or (pairs.size and (pairs.min() < 0 or pairs.max() >= vocab_size)):
        return None
    return pairs


def _save_merges(path: Path, pairs: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, pairs)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return
