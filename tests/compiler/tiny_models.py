"""Small random models with weights of many types, and the means to step through them."""

import re
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np

from effinfer import _core
from effinfer.graph import GraphBuilder, Value

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WIDTH, FFN, VOCAB, LAYERS = 96, 160, 101, 2
PAGE = 64


@dataclass
class TinyModel:
    """A graph, its weights for the compiler, and the same weights as float64 for the oracle."""

    graph: _core.Graph
    source: _core.MemoryWeights
    exact: dict[str, np.ndarray]

    def compile(self, *, threads: int = 2, **options: Any) -> _core.Executable:
        settings = {"max_tokens": 96, "max_sequences": 4, "max_rows": 96, "max_seq_len": 256}
        pool = _core.ThreadPool(threads, oversubscribe=True)
        options = _core.CompileOptions(**{**settings, **options})
        return _core.compile(self.graph, self.source, pool, options)


def sparse(model: TinyModel, method: Any) -> TinyModel:
    """The model with a method that chooses which keys it visits."""
    return TinyModel(method.graph(model.graph), model.source, model.exact)


def with_attribute(model: TinyModel, name: str, value: str) -> TinyModel:
    """The model whose nodes have another value, wherever they have the attribute."""
    text = model.graph.to_string()
    changed, count = re.subn(rf"\b{name} = (\[[^]]*\]|[^,}}]+)", f"{name} = {value}", text)
    assert count > 0
    return TinyModel(_core.Graph.parse(changed), model.source, model.exact)


@dataclass
class ModelMaker:
    """A builder whose weights are random, of the type asked for."""

    name: str
    dtypes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.g = GraphBuilder(self.name)
        self.source = _core.MemoryWeights()
        self.exact: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(5)

    def weight(self, name: str, *shape: int) -> Value:
        """A weight whose type is that of its last part in `dtypes`; f32 without one."""
        if name not in self.exact:
            self._make(name, shape)
        return self.g.weight(name, self.source.dtype(name), list(shape))

    def _make(self, name: str, shape: tuple[int, ...]) -> None:
        dtype = self.dtypes.get(name.split(".")[-1], "f32")
        if len(shape) == 1:
            values = (1.0 + 0.2 * self.rng.standard_normal(shape)).astype(np.float32)
        else:
            values = self.rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[1])
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        array = np.ascontiguousarray(gguf.quants.quantize(values, kind))
        self.source.add(name, array, dtype, list(shape))
        self.exact[name] = gguf.quants.dequantize(array, kind).astype(np.float64).reshape(shape)

    def finish(self, logits: Value) -> TinyModel:
        self.g.set_metadata("context_length", 256)
        return TinyModel(self.g.finish(logits), self.source, self.exact)


def make_llama(*, bias: bool = False, activation: str = "silu", **dtypes: str) -> TinyModel:
    """Pre-norm blocks, GQA, a gated MLP; interleaved rotation as in GGUF files."""
    m = ModelMaker("llama", dtypes)
    g = m.g
    ids = g.input("token_ids", "i32", ["T"])
    table = g.rope_table(g.input("positions", "i32", ["T"]), dims=HEAD_DIM, theta=1e4)
    rows = g.input("logit_rows", "i32", ["R"])
    x = g.embedding(ids, m.weight("embed", VOCAB, WIDTH))
    for i in range(LAYERS):
        h = g.rms_norm(x, m.weight(f"{i}.norm", WIDTH), eps=1e-5)
        q, k, v = (
            g.linear(
                h,
                m.weight(f"{i}.{name}", heads * HEAD_DIM, WIDTH),
                m.weight(f"{i}.{name}_bias", heads * HEAD_DIM) if bias else None,
            )
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        q = g.rope(q, table, heads=HEADS, head_dim=HEAD_DIM, interleaved=True)
        k = g.rope(k, table, heads=KV_HEADS, head_dim=HEAD_DIM, interleaved=True)
        kv = g.kv_append(k, v, layer=i, heads=KV_HEADS, head_dim=HEAD_DIM)
        shape: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        h = g.attention(q, kv, layer=i, sm_scale=HEAD_DIM**-0.5, **shape)
        x = g.add(x, g.linear(h, m.weight(f"{i}.o", WIDTH, HEADS * HEAD_DIM)))
        h = g.rms_norm(x, m.weight(f"{i}.ffn_norm", WIDTH), eps=1e-5)
        gate = g.node(activation, g.linear(h, m.weight(f"{i}.gate", FFN, WIDTH)))
        h = g.mul(gate, g.linear(h, m.weight(f"{i}.up", FFN, WIDTH)))
        x = g.add(x, g.linear(h, m.weight(f"{i}.down", WIDTH, FFN)))
    x = g.rms_norm(g.select_rows(x, rows), m.weight("out_norm", WIDTH), eps=1e-5)
    return m.finish(g.linear(x, m.weight("embed", VOCAB, WIDTH)))


def make_gemma(**dtypes: str) -> TinyModel:
    """Scaled embedding, q and k norms, post-norms, windows, sinks, GeGLU, soft caps, an untied
    head."""
    m = ModelMaker("gemma", dtypes)
    g = m.g
    ids = g.input("token_ids", "i32", ["T"])
    table = g.rope_table(g.input("positions", "i32", ["T"]), dims=HEAD_DIM, theta=1e4)
    rows = g.input("logit_rows", "i32", ["R"])
    x = g.embedding(ids, m.weight("embed", VOCAB, WIDTH), scale=WIDTH**0.5)
    for i in range(LAYERS):

        def norm(x: Value, name: str, layer: int = i) -> Value:
            return g.rms_norm(x, m.weight(f"{layer}.{name}", WIDTH), eps=1e-6)

        h = norm(x, "norm")
        q = g.linear(h, m.weight(f"{i}.q", HEADS * HEAD_DIM, WIDTH))
        k = g.linear(h, m.weight(f"{i}.k", KV_HEADS * HEAD_DIM, WIDTH))
        v = g.linear(h, m.weight(f"{i}.v", KV_HEADS * HEAD_DIM, WIDTH))
        q = g.rms_norm(q, m.weight(f"{i}.q_norm", HEAD_DIM), eps=1e-6, groups=HEADS)
        k = g.rms_norm(k, m.weight(f"{i}.k_norm", HEAD_DIM), eps=1e-6, groups=KV_HEADS)
        q = g.rope(q, table, heads=HEADS, head_dim=HEAD_DIM)
        k = g.rope(k, table, heads=KV_HEADS, head_dim=HEAD_DIM)
        kv = g.kv_append(k, v, layer=i, heads=KV_HEADS, head_dim=HEAD_DIM)
        shape: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        window = 5 if i == 0 else 9
        h = g.attention(
            q,
            kv,
            layer=i,
            sm_scale=0.25,
            window_left=window,
            sink_tokens=2 * i,
            logits_soft_cap=20.0,
            **shape,
        )
        x = g.add(x, norm(g.linear(h, m.weight(f"{i}.o", WIDTH, HEADS * HEAD_DIM)), "post_norm"))
        h = norm(x, "ffn_norm")
        gate = g.gelu_tanh(g.linear(h, m.weight(f"{i}.gate", FFN, WIDTH)))
        h = g.mul(gate, g.linear(h, m.weight(f"{i}.up", FFN, WIDTH)))
        x = g.add(norm(g.linear(h, m.weight(f"{i}.down", WIDTH, FFN)), "post_ffn_norm"), x)
    x = g.rms_norm(g.select_rows(x, rows), m.weight("out_norm", WIDTH), eps=1e-6)
    return m.finish(g.softcap(g.linear(x, m.weight("head", VOCAB, WIDTH)), cap=30.0))


class Stepper:
    """Feeds sequences to an executable; each owns whole pages of one cache."""

    def __init__(self, executable: _core.Executable, sequences: int = 1) -> None:
        self.executable = executable
        self.pages = 256 // PAGE
        self.cache = executable.make_cache(self.pages * sequences)
        self.lengths = [0] * sequences

    def step(
        self, tokens: dict[int, list[int]], phase: str, dense: list[int] | None = None
    ) -> list[np.ndarray]:
        """Appends tokens to some sequences; the logits of all their rows, by sequence."""
        ids: list[int] = []
        positions: list[int] = []
        indices: list[int] = []
        qo_indptr, kv_indptr, kv_len = [0], [0], []
        for sequence, new in tokens.items():
            start = self.lengths[sequence]
            self.lengths[sequence] += len(new)
            ids += new
            positions += range(start, self.lengths[sequence])
            used = -(-self.lengths[sequence] // PAGE)
            # Pages in an order of their own: nothing may assume that they are neighbours.
            indices += [sequence + len(self.lengths) * page for page in range(used)]
            qo_indptr.append(len(ids))
            kv_indptr.append(len(indices))
            kv_len.append(self.lengths[sequence])
        logits = self.executable.run(
            token_ids=ids,
            positions=positions,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=indices,
            kv_len=kv_len,
            logit_rows=list(range(len(ids))),
            cache=self.cache,
            phase=phase,
            dense=dense,
        )
        return np.split(logits, qo_indptr[1:-1])

    def feed(self, tokens: list[int], chunk: int, phase: str, sequence: int = 0) -> np.ndarray:
        """A whole sequence in chunks."""
        steps = range(0, len(tokens), chunk)
        return np.concatenate(
            [self.step({sequence: tokens[i : i + chunk]}, phase)[0] for i in steps]
        )
