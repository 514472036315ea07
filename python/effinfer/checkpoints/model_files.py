"""What a model's files hold, whichever form they have: a GGUF file, an effinfer artifact, a
Hugging Face folder."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.files.metadata import read_json
from effinfer.load_log import forward_core_log
from effinfer.models import build_graph
from effinfer.models.config import ModelConfig
from effinfer.models.gguf_config import config_from_gguf
from effinfer.models.hf_config import config_from_hf

if TYPE_CHECKING:
    from effinfer.sampling import SamplingParams
    from effinfer.text.chat import ChatTemplate
    from effinfer.text.tokenizer import Tokenizer

GRAPH_KEY = "effinfer.graph"

# Control tokens that end an answer: files often name only one of them as end of sequence.
_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "</s>",
)
_CONTROL = 3

# Scales are read as numbers, and frequencies are computed.
_HARMLESS = re.compile(r"\.scale$|inv_freq$|\.attn_rot_embd\b")


@dataclass(frozen=True)
class ModelFiles:
    """An opened model. The tokenizer and the template are read on demand: they cost more than the
    weights, and evaluation needs neither."""

    path: Path
    architecture: str
    graph: _core.Graph
    weights: _core.WeightSource
    gguf: _core.GgufFile | None = None
    config: ModelConfig | None = None  # of a folder

    def tokenizer(self) -> "Tokenizer":
        from effinfer.text.tokenizer import Tokenizer

        if self.gguf is not None:
            tokenizer = Tokenizer.from_gguf(self.gguf)
        else:
            tokenizer = Tokenizer.from_folder(self.path)
        _core.trim_heap()  # building one frees as much as it keeps: 53 MB of 262k pieces
        return tokenizer

    def chat_template(self, tokenizer: "Tokenizer", override: str | None) -> "ChatTemplate":
        """`override` or the model's own; throws InvalidArgumentError when there is neither."""
        from effinfer.text.chat import ChatTemplate, missing_template

        source = self._template_source() if override is None else override
        if source is None:
            raise missing_template(str(self.path))
        return ChatTemplate(
            source,
            bos_token=tokenizer.token(tokenizer.bos_token_id),
            eos_token=tokenizer.token(tokenizer.eos_token_id),
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template_source())

    def recommended_params(self) -> "SamplingParams":
        """Throws FormatError for a value that no sampling can have."""
        from effinfer.checkpoints.recommended import recommended_params

        return recommended_params(self.path, self.gguf)

    def _template_source(self) -> str | None:
        if self.gguf is not None:
            source = self.gguf.get("tokenizer.chat_template")
            return None if source is None else str(source)
        path = self.path / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        source = read_json(self.path / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):  # several named ones
            named = {entry.get("name"): entry.get("template") for entry in source}
            source = named.get("default")
        return source


def open_model(path: Path, *, head: str | None = None) -> ModelFiles:
    """Opens a GGUF file or a Hugging Face folder and builds the graph (an artifact brings its own).
    `head`: the dtype that the output matrix gets, in memory, whatever the file has.

    Throws FileError (missing, unreadable), FormatError (broken), UnsupportedError (architecture,
    option, dtype), InvalidArgumentError (a weight that is missing or of another shape).
    """
    forward_core_log()
    return _open_folder(path, head) if path.is_dir() else _open_gguf(path, head)


def _open_gguf(path: Path, head: str | None) -> ModelFiles:
    file = _core.GgufFile(str(path))
    text = file.get(GRAPH_KEY)
    if text is not None:
        if head is not None:
            raise _core.UnsupportedError(f"[load] head: {path} brings its own graph")
        graph = _core.Graph.parse(text)
        return ModelFiles(path, graph.name, graph, file, file)
    weights = _with_head(file, head)
    config = config_from_gguf(
        file,
        vocab_size=int(file.shape("token_embd.weight")[0]),
        tied_head="output.weight" not in weights,
        eos_token_ids=_gguf_eos(file),
    )
    graph = build_graph(config, weights)
    _refuse_unread(path, file, graph)
    return ModelFiles(path, config.architecture, graph, weights, file)


def _refuse_unread(path: Path, file: _core.GgufFile, graph: _core.Graph) -> None:
    """A tensor that the definition does not read is a part that the model would run without."""
    read = set(graph.weight_names)
    names = [tensor.name for tensor in file.tensors()]
    unread = [name for name in names if name not in read and not _HARMLESS.search(name)]
    if unread:
        raise _core.UnsupportedError(
            f"[load] {path}: expected the tensors of {graph.name}, got also {', '.join(unread[:3])}"
            + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        )


def _with_head(weights: _core.WeightSource, head: str | None) -> _core.WeightSource:
    """The output matrix, or the embedding that serves as one, with weights of dtype `head`."""
    if head is None:
        return weights
    name = "output.weight" if "output.weight" in weights else "token_embd.weight"
    data, _ = _core.quantize_weight(weights, name, head)
    layered = _core.LayeredWeights(weights)
    layered.add("output.weight", data, head, weights.shape(name))
    return layered


def _gguf_eos(file: _core.GgufFile) -> list[int]:
    named = (file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ids = {int(value) for value in named if value is not None}
    tokens, types = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    if {tokens, types} <= set(file.keys()):
        control = file.strings_where(tokens, types, _CONTROL)
        ids.update(index for index, token in control.items() if token in _END_TOKENS)
    return sorted(ids)


def _open_folder(path: Path, head: str | None) -> ModelFiles:
    from effinfer.checkpoints.folder_weights import load_folder_weights
    from effinfer.checkpoints.hf_ternary import ternary_format

    config_file = read_json(path / "config.json")
    if not config_file:
        raise _core.FileError(f"[load] {path}: expected a folder with a config.json")
    config = config_from_hf(config_file, eos_token_ids=_folder_eos(path, config_file))
    ternary = ternary_format(config_file)
    files = load_folder_weights(
        path, config.architecture, tied_head=config.tied_head, ternary=ternary
    )
    weights = _with_head(files, head)
    if head is not None:
        config = replace(config, tied_head=False)
    graph = build_graph(config, weights)
    return ModelFiles(path, config.architecture, graph, weights, config=config)


def _folder_eos(path: Path, config: dict[str, Any]) -> list[int]:
    """eos_token_id of generation_config.json and config.json: a number or a list."""
    ids: list[int] = []
    for source in (read_json(path / "generation_config.json"), config):
        value = source.get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise _core.FormatError("[load] eos_token_id: expected an integer or a list of them")
    return sorted(set(ids))
