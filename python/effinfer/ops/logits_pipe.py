"""FlashInfer's pipelines: LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])(logits, ...).

Processors that follow one another in the order temperature, top-k, softmax, top-k, top-p, min-p,
sample run as one kernel call, which passes over a row once for all of them; others as several. A
filter renormalises what it leaves (masks, of logits).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from effinfer._core import InvalidArgumentError, Queue, ThreadPool
from effinfer.ops.shared.options import unsupported
from effinfer.ops.shared.row_arguments import filter_rows, sample


class TensorType(Enum):
    """What the rows of an array are."""

    LOGITS = "logits"
    PROBS = "probs"
    INDICES = "indices"


@dataclass(frozen=True)
class TaggedTensor:
    """An array that says what it is; a pipe takes it in place of a plain one."""

    data: Any
    type: TensorType


class LogitsProcessor:
    """A step of a pipe: the types that it takes, the type that it gives, its parameter, which is
    given at run time or, for all runs, here."""

    takes: tuple[TensorType, ...] = (TensorType.PROBS,)
    gives: TensorType | None = None  # None: what it takes
    parameter: str | None = None

    def __init__(self, **params: Any) -> None:
        for name in params:
            if name != self.parameter:
                raise InvalidArgumentError(
                    f"[LogitsPipe] {self}: expected {self.parameter or 'no parameter'}, got {name}"
                )
        self.params = params

    def value(self, values: dict[str, Any]) -> Any:
        """The parameter of a run, or the processor's own; None without either."""
        given = values.get(str(self.parameter))
        return self.params.get(str(self.parameter)) if given is None else given

    def __repr__(self) -> str:
        return type(self).__name__


class Temperature(LogitsProcessor):
    """Logits divided by `temperature`."""

    takes = (TensorType.LOGITS,)
    parameter = "temperature"


class Softmax(LogitsProcessor):
    """Logits to probabilities."""

    takes = (TensorType.LOGITS,)
    gives = TensorType.PROBS

    def __init__(self, enable_pdl: bool | None = None) -> None:
        super().__init__()
        self.enable_pdl = enable_pdl


class TopK(LogitsProcessor):
    """The `top_k` likeliest. `joint_topk_topp`: a TopP joined to it sees the whole row too."""

    takes = (TensorType.LOGITS, TensorType.PROBS)
    parameter = "top_k"

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(**params)
        self.joint_topk_topp = joint_topk_topp


class TopP(LogitsProcessor):
    """The nucleus of mass `top_p`."""

    parameter = "top_p"


class MinP(LogitsProcessor):
    """What is at least `min_p` times as likely as the likeliest."""

    parameter = "min_p"


class Sample(LogitsProcessor):
    """A token of each row: int32. Run time: `indices`, `generator`, `seed`, `offset`."""

    takes = (TensorType.LOGITS, TensorType.PROBS)
    gives = TensorType.INDICES

    def __init__(self, deterministic: bool = True) -> None:
        super().__init__()
        self.deterministic = deterministic


_DRAW = ("indices", "generator", "seed", "offset")
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "is_deterministic", *_DRAW)


@dataclass
class _Call:
    """Processors that one kernel call runs."""

    start: TensorType
    type: TensorType
    place: int = -1
    joint: bool = False
    processors: list[LogitsProcessor] = field(default_factory=list)

    def place_of(self, processor: LogitsProcessor) -> int:
        """When the kernel does it; -1: it cannot, after what the call holds already."""
        order = (Temperature, TopK, Softmax, TopP, MinP, Sample)
        place = 2 * order.index(type(processor))
        if isinstance(processor, TopK):
            if any(isinstance(other, TopK) for other in self.processors):
                return -1
            if self.type is TensorType.PROBS:
                place = 2 * order.index(Softmax) + 1
        return place if place > self.place else -1

    def add(self, processor: LogitsProcessor) -> None:
        last = self.processors[-1] if self.processors else None
        if isinstance(processor, TopP) and isinstance(last, TopK):
            self.joint = last.joint_topk_topp
        self.place = self.place_of(processor)
        self.processors.append(processor)
        self.type = processor.gives or self.type

    def run(self, x: Any, values: dict[str, Any], pool: ThreadPool | Queue | None) -> Any:
        filters = {p.parameter: p.value(values) for p in self.processors if p.parameter}
        call: dict[str, Any] = {**filters, "joint": self.joint, "pool": pool}
        if self.type is TensorType.INDICES:
            draw: dict[str, Any] = {name: values.get(name) for name in _DRAW}
            return sample("LogitsPipe", self.start.value, x, **draw, **call)
        dtype = "float32" if self.start is not self.type else None
        return filter_rows("LogitsPipe", self.start.value, x, self.type.value, dtype=dtype, **call)


class LogitsPipe:
    """A sequence of processors, called with logits or probs [batch, vocab] and their parameters.

    Args:
        compile: join processors into as few kernel calls as can be; else a call for each.
        input_type: needed where the first processor takes logits and probs alike.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: Any = None,
        custom_validity_checks: Any = None,
    ) -> None:
        rules = {"custom_fusion_rules": custom_fusion_rules}
        unsupported("LogitsPipe", **rules, custom_validity_checks=custom_validity_checks)
        if not processors:
            raise InvalidArgumentError("[LogitsPipe] processors: expected at least one, got none")
        self.processors = list(processors)
        known = (Temperature, Softmax, TopK, TopP, MinP, Sample)
        for processor in self.processors:
            if type(processor) not in known:
                raise InvalidArgumentError(
                    f"[LogitsPipe] processors: expected processors of effinfer.ops.logits_pipe, "
                    f"got {type(processor).__name__}"
                )
        takes = self.processors[0].takes
        if input_type is None and len(takes) > 1:
            raise InvalidArgumentError(
                f"[LogitsPipe] input_type: expected a TensorType, as {self.processors[0]} takes "
                "logits and probs, got None"
            )
        self.initial_type = takes[0] if input_type is None else input_type
        self._calls: list[_Call] = []
        self._join(compile)

    def compile(self) -> None:
        """Joins processors into as few kernel calls as can be."""
        self._join(True)

    def _join(self, join: bool) -> None:
        self._calls = []
        kind = self.initial_type
        for processor in self.processors:
            if kind not in processor.takes:
                expected = " or ".join(t.value for t in processor.takes)
                raise InvalidArgumentError(
                    f"[LogitsPipe] processors: expected {processor} to follow {expected}, "
                    f"got {kind.value}"
                )
            call = self._calls[-1] if self._calls else None
            if call is None or not join or call.place_of(processor) < 0:
                call = _Call(kind, kind)
                self._calls.append(call)
            call.add(processor)
            kind = call.type

    def __repr__(self) -> str:
        calls = ", ".join("+".join(map(repr, call.processors)) for call in self._calls)
        return f"LogitsPipe([{' -> '.join(map(repr, self.processors))}], calls=[{calls}])"

    def __call__(self, x: Any, *, pool: ThreadPool | Queue | None = None, **values: Any) -> Any:
        """Runs the pipe on x; `values` are the parameters of its processors, by name.
        `is_deterministic` changes nothing: results always are."""
        for name in values:
            if name not in _PARAMETERS:
                raise InvalidArgumentError(
                    f"[LogitsPipe] {name}: expected one of {', '.join(_PARAMETERS)}"
                )
        for processor in self.processors:
            if processor.parameter is not None and processor.value(values) is None:
                raise InvalidArgumentError(
                    f"[LogitsPipe] {processor.parameter}: expected a value for {processor}, "
                    "got none"
                )
        if isinstance(x, TaggedTensor):
            if x.type is not self.initial_type:
                raise InvalidArgumentError(
                    f"[LogitsPipe] input: expected {self.initial_type.value}, got {x.type.value}"
                )
            x = x.data
        for call in self._calls:
            x = call.run(x, values, pool)
        return x
