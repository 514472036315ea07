"""Graphs that a technique runs itself, a step at a time, beside the engine's: texts in a cache of
its own, read by several graphs of the same layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from effinfer import _core

if TYPE_CHECKING:  # imported when arrays are asked for: they cost more than the rest
    import numpy as np
    import numpy.typing as npt

    from effinfer.checkpoints.model_files import ModelFiles

# Rows of a step that still are computed as decoding computes them.
_SHORT = 16
# Tokens of a step.
_MOST = 512


class GraphSteps:
    """A compiled model and its pages. Of one thread at a time."""

    def __init__(self, executable: _core.Executable, max_tokens: int) -> None:
        """max_tokens: that the cache holds, over all texts."""
        self.executable = executable
        self.cache = executable.make_cache(-(-max_tokens // _core.KvCache.page_size) + 1)

    @classmethod
    def of(
        cls,
        files: ModelFiles,
        graph: _core.Graph,
        max_tokens: int,
        threads: int | None = None,
        weights: _core.WeightSource | None = None,
        max_rows: int = 64,
    ) -> GraphSteps:
        """Compiles a graph over a model's weights, or over `weights`. max_rows: of logits in a
        step. Throws what compiling throws."""
        context = int(files.graph.metadata["context_length"])
        options = _core.CompileOptions(
            max_tokens=_MOST,
            max_seq_len=min(context, max_tokens),
            max_sequences=1,
            max_rows=max_rows,
        )
        pool = _core.ThreadPool(threads or 0)
        return cls(_core.compile(graph, weights or files.weights, pool, options), max_tokens)

    def beside(self, graph: _core.Graph) -> _core.Executable:
        """Another graph of the model's layers, for feed(); it has packed nothing anew."""
        return _core.compile_beside(self.executable, graph)

    def begin(self) -> int:
        """A text without tokens."""
        return self.cache.create([])[0]

    def end(self, text: int) -> None:
        self.cache.release(text, False)

    def follow(self, text: int, tokens: Sequence[int]) -> list[int]:
        """Drops what these tokens do not begin with; returns what the text then lacks of them, the
        last one at least."""
        known = self.cache.tokens(text)
        pairs = zip(known, tokens[:-1], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.drop(text, len(known) - same)
        return list(tokens[same:])

    def drop(self, text: int, count: int) -> None:
        """Takes the last tokens back."""
        if count > 0:
            self.cache.rollback(text, count)

    def feed(
        self,
        text: int,
        tokens: Sequence[int],
        rows: int = 1,
        executable: _core.Executable | None = None,
        floats: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Appends tokens; float32 [rows, vocab]: logits behind the last ones. floats: float inputs
        of the graph, [len(tokens), size]. Throws OutOfMemoryError where no page is left,
        InvalidArgumentError beyond the context."""
        import numpy as np

        runs = executable or self.executable
        first = len(tokens) % _MOST or _MOST  # the last step is a whole one
        for begin in range(first - _MOST, len(tokens), _MOST):
            chunk = list(tokens[max(begin, 0) : begin + _MOST])
            size, start = len(chunk), self.cache.length(text)
            wanted = range(size - rows, size) if begin + _MOST == len(tokens) else range(0)
            self.cache.append(text, chunk)
            pages = self.cache.pages(text)
            try:
                logits = runs.run(
                    token_ids=chunk,
                    positions=np.arange(start, start + size),
                    qo_indptr=[0, size],
                    kv_indptr=[0, len(pages)],
                    kv_indices=pages,
                    kv_len=[start + size],
                    logit_rows=list(wanted),
                    cache=self.cache,
                    float_inputs={
                        name: value[max(begin, 0) : begin + _MOST]
                        for name, value in (floats or {}).items()
                    },
                    phase="prefill" if size > _SHORT else "decode",
                )
            except BaseException:
                self.cache.rollback(text, size)
                raise
            self.cache.commit(text, size)
        return logits
