"""What the wrappers with plan() and run() have in common: workspaces, buffers of fixed sizes."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from effinfer import _core
from effinfer.ops.shared.arrays import Array, dtype_name
from effinfer.ops.shared.options import LAYOUTS, expect, indices, one_of, unsupported
from effinfer.ops.shared.places import HOST, AnyView, DevicePlace, Place, place_of
from effinfer.ops.shared.planned import PlannedAttention


class FixedBuffers:
    """The caller's buffers of a wrapper that is made with `use_cuda_graph=True`.

    plan() copies its lists into them, and run() is of those: the batch has the size of the
    buffers, lists fit into theirs, and no later plan has more query rows than the first.

    With buffers on a GPU plans lie there at addresses that stay, so that a CUDA graph of run() runs
    what was planned last. plan() puts them there in the current stream of the buffers' library.
    """

    def __init__(self, op: str, *, on_gpu: bool = False, **buffers: Any) -> None:
        """`on_gpu`: whether the wrapper's kernels run there."""
        self._op = op
        self._views: dict[str, AnyView] = {}
        self._at: Place = HOST
        self._library: Any = None  # an array of the caller's, whose stream plans are put into
        self._fixed: _core.FixedPlans | None = None
        self._first: PlannedAttention | None = None
        for name, buffer in buffers.items():
            argument = f"[{op}] {name}"
            expect(buffer is not None, argument, "an array with use_cuda_graph", None)
            if on_gpu and self._library is None:
                self._library = buffer
                self._at = place_of(buffer, None, argument)
            view = self._at.writable(buffer, argument)
            type_name = dtype_name(view.dtype)
            ok = view.ndim == 1 and type_name in ("int32", "uint8")
            expect(ok, argument, "int32 or uint8 of 1 dimension", f"{type_name} {view.shape}")
            if isinstance(self._at, DevicePlace):
                where, place = getattr(view, "device", "cpu"), self._at.executor.device
                expect(where == place, argument, f"an array on {place}", f"one on {where}")
            self._views[name] = view
        self._rows: int | None = None

    def same_size(self, first: str, second: str, difference: int) -> None:
        """Asserts that the first buffer has `difference` elements more than the second."""
        size = self._views[second].size + difference
        got = self._views[first].size
        expect(got == size, f"[{self._op}] {first}", f"{size} values, as of {second}", got)

    def batch(self, name: str, count: int) -> None:
        """Asserts that a list of `count` elements fills a buffer."""
        size = self._views[name].size
        expect(count == size, f"[{self._op}] plan", f"{size} values, the size of {name}", count)

    def rows(self, count: int) -> None:
        """Asserts that there are not more query rows than of the first plan."""
        if self._rows is None:
            self._rows = count
        ok = count <= self._rows
        expect(ok, f"[{self._op}] plan", f"at most {self._rows} query rows, the first's", count)

    def keep(self, **lists: Any) -> None:
        """Copies lists to the first elements of the buffers of their names."""
        given = {name: self._values(name, x) for name, x in lists.items()}
        for name, values in given.items():
            size = self._views[name].size
            argument = f"[{self._op}] plan"
            expect(values.size <= size, argument, f"at most {size} values for {name}", values.size)
        if self._library is not None:
            self._at = place_of(self._library, None, f"[{self._op}] plan")
        for name, values in given.items():
            part = self._views[name][: values.size]
            if isinstance(self._at, DevicePlace):
                self._at.executor.upload(part, np.ascontiguousarray(values, part.dtype))
            else:
                part[...] = values

    def place(self, planned: PlannedAttention, listed: str = "", mask: str = "") -> None:
        """Puts a plan where those before it were, if the buffers lie on a GPU; `listed` and `mask`
        are the buffers of the lists of pages and of the bits of masks."""
        if not isinstance(self._at, DevicePlace):
            return
        if self._fixed is None:
            sizes = [
                self._views[name].size if name in self._views else 0 for name in (listed, mask)
            ]
            self._fixed = _core.FixedPlans(*sizes)
        planned.place(self._fixed, self._first, self._at)
        if self._first is None:
            self._first = planned

    def _values(self, name: str, x: Any) -> Array:
        if dtype_name(self._views[name].dtype) == "uint8":
            return np.asarray(x, np.uint8).reshape(-1)
        return indices(x, f"[{self._op}] {name}")


class Wrapper(ABC):
    """plan() once a step, run() once a layer."""

    _op: str
    _planned: PlannedAttention | None
    _buffers: FixedBuffers | None = None

    def _start(self, kv_layout: str, **refused: Any) -> None:
        self._layout = one_of(kv_layout, LAYOUTS, f"[{self._op}] kv_layout")
        self._planned = None
        unsupported(self._op, **refused)

    @abstractmethod
    def plan(self, *lists: Any, **options: Any) -> None: ...

    @abstractmethod
    def run(self, *arrays: Any, **options: Any) -> Any: ...

    def begin_forward(self, *lists: Any, **options: Any) -> None:
        """The old name of plan()."""
        self.plan(*lists, **options)

    def run_return_lse(self, *arrays: Any, **options: Any) -> Any:
        """run() with `return_lse=True`."""
        return self.run(*arrays, **options, return_lse=True)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper has buffers of fixed sizes."""
        return self._buffers is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Takes other workspaces, which have no effect, as the first have none."""
        del float_workspace_buffer, int_workspace_buffer
