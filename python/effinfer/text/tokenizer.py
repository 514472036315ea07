"""Text to token ids and back."""

import functools
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from effinfer import _core
from effinfer.files.metadata import Metadata, read_json, token_text
from effinfer.text.tokenizer_gguf import HF_TOKENIZER_KEY, build_tokenizer
from effinfer.text.trust import ControlTokens

_REPLACEMENT = "\ufffd"
# The backend holds the interpreter's lock while it encodes one text, 2 s a megabyte, and lets go of
# it for a batch, which costs more to start.
_LONG_TEXT = 4096
# Results of tokens_with() that are kept: a service asks for the same few again and again.
_MOST_SEARCHES = 64


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's conventions. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        own_specials: bool = False,
    ) -> None:
        """`own_specials`: the backend's post-processor adds BOS and EOS (Hugging Face files);
        otherwise `add_bos` and `add_eos` say what encode() adds."""
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._add_bos = add_bos and bos_token_id is not None
        self._add_eos = add_eos and eos_token_id is not None
        self._own_specials = own_specials
        # `encode_special_tokens` is a switch of the backend: encode() must not interleave.
        self._lock = threading.Lock()
        self._tokens_with: dict[str, list[int]] = {}

    @classmethod
    def from_gguf(cls, metadata: Metadata) -> "Tokenizer":
        """The tokenizer of a GGUF file's metadata; throws FormatError, UnsupportedError."""

        def identifier(name: str) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{name}_token_id")
            return None if value is None else int(value)

        text = metadata.get(HF_TOKENIZER_KEY)
        if text is not None:
            return cls(
                _parse(text, HF_TOKENIZER_KEY),
                bos_token_id=identifier("bos"),
                eos_token_id=identifier("eos"),
                own_specials=True,
            )
        sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
        return cls(
            build_tokenizer(metadata),
            bos_token_id=identifier("bos"),
            eos_token_id=identifier("eos"),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", sentencepiece)),
            add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder: tokenizer.json and any tokenizer_config.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise _core.FileError(f"[tokenizer] {path}: no such file")
        backend = _parse(path.read_text(encoding="utf-8"), str(path))
        config = read_json(folder / "tokenizer_config.json")
        bos, eos = (token_text(config.get(f"{name}_token")) for name in ("bos", "eos"))
        return cls(
            backend,
            bos_token_id=backend.token_to_id(bos) if bos else None,
            eos_token_id=backend.token_to_id(eos) if eos else None,
            own_specials=True,
        )

    @property
    def is_busy(self) -> bool:
        """Whether a thread encodes: another would wait for it."""
        return self._lock.locked()

    @functools.cached_property
    def longest_token(self) -> int:
        """Letters of the longest token: no text has more of them than that for each token."""
        return max(map(len, self.backend.get_vocab()), default=1)

    def tokens_with(self, text: str) -> list[int]:
        """Ids of the tokens whose own text has this in it, ascending."""
        found = self._tokens_with.get(text)
        if found is None:
            if len(self._tokens_with) >= _MOST_SEARCHES:
                self._tokens_with.clear()
            found = [token for token, own in enumerate(self._token_texts) if text in own]
            self._tokens_with[text] = found
        return found

    @functools.cached_property
    def _token_texts(self) -> list[str]:
        ids = [[token] for token in range(self.vocab_size)]
        return list(self.backend.decode_batch(ids, skip_special_tokens=False))

    @functools.cached_property
    def control_tokens(self) -> ControlTokens:
        added = self.backend.get_added_tokens_decoder().values()
        return ControlTokens(token.content for token in added if token.special)

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size())

    def token(self, token_id: int | None) -> str:
        """The text of a token as the vocabulary spells it; "" for None or an unknown id."""
        return "" if token_id is None else self.backend.id_to_token(token_id) or ""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`. `add_special` adds BOS and EOS as the model wants them (a BOS that
        the text spells out is not doubled). With `parse_special` control tokens spelled out in
        the text become those tokens; without, they are ordinary text: for untrusted input. Throws
        InvalidArgumentError for what is no text."""
        with self._lock:
            self.backend.encode_special_tokens = not parse_special
            ids = self._encode(text, adds_specials=add_special and self._own_specials)
        bos, eos = self.bos_token_id, self.eos_token_id
        if add_special and self._own_specials:
            return ids[1:] if len(ids) > 1 and bos is not None and ids[:2] == [bos, bos] else ids
        if add_special and self._add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if add_special and self._add_eos and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return ids

    def _encode(self, text: str, *, adds_specials: bool) -> list[int]:
        try:
            if len(text) > _LONG_TEXT:
                (encoded,) = self.backend.encode_batch_fast(
                    [text], add_special_tokens=adds_specials
                )
            else:
                encoded = self.backend.encode(text, add_special_tokens=adds_specials)
        except TypeError:
            got = "half of a surrogate pair" if isinstance(text, str) else type(text).__name__
            raise _core.InvalidArgumentError(
                f"[tokenize] text: expected a str of whole characters, got {got}"
            ) from None
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Throws InvalidArgumentError
        for an id that the vocabulary lacks."""
        size = self.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise _core.InvalidArgumentError(
                    f"[detokenize] ids: expected ids in [0, {size}), got {token_id}"
                )
        return self._decode(list(ids), skip_special)

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        return str(self.backend.decode(ids, skip_special_tokens=skip_special))

    def stream(self, *, skip_special: bool = True) -> "StreamDecoder":
        return StreamDecoder(self, skip_special)


def _parse(text: str, label: str) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # what the library raises for a broken file is a bare one
        raise _core.FormatError(f"[tokenizer] {label}: {error}") from None


class StreamDecoder:
    """Turns ids into text as they come and never emits part of a character: bytes wait until the
    character is whole.

    Each step decodes a window that begins before the new ids, since what a piece looks like may
    depend on the pieces before it (a leading space, bytes of one character), and emits what the
    window grew by.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []  # the window
        self._done = 0  # ids of the window whose text has been emitted

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; "" while a character is unfinished."""
        self._ids.extend(ids)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._ids = self._ids[self._done :]
        self._done = len(self._ids)
        return text

    def finish(self) -> str:
        """What is left, with U+FFFD for an unfinished character."""
        text = self._new_text()
        self._ids, self._done = [], 0
        return text

    def _new_text(self) -> str:
        decode = self._tokenizer._decode
        before = decode(self._ids[: self._done], self._skip_special)
        return decode(self._ids, self._skip_special)[len(before) :]
