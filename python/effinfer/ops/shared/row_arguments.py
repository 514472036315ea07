"""What the sampling functions share: parameters of rows, seeds, and the call itself."""

import os
import sys
from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import DeviceArray, InvalidArgumentError, Queue, ThreadPool
from effinfer.ops.shared import arrays
from effinfer.ops.shared.places import HOST, AnyView, Place, place_of

_FILTERS = {"temperature": "f", "top_k": "i", "top_p": "f", "min_p": "f"}
_DTYPES: dict[str, np.dtype[Any]] = {"f": np.dtype(np.float32), "i": np.dtype(np.int64)}


def parameter(value: Any, kind: str, argument: str, at: Place = HOST) -> AnyView:
    """A number, or an array of numbers, as float32 ("f") or int64 ("i"); a GPU's stays as it is."""
    if isinstance(value, (int, float, np.generic)) and not isinstance(value, np.bool_):
        array = np.asarray(value)
    else:
        array = at.dense(value, argument)
    if isinstance(array, DeviceArray):
        return array
    allowed = "iu" if kind == "i" else "fiu"
    if array.dtype.kind not in allowed or array.dtype.metadata:
        numbers = "an integer or integers" if kind == "i" else "a number or numbers"
        got = arrays.dtype_name(array.dtype)
        raise InvalidArgumentError(f"{argument}: expected {numbers}, got {got}")
    return array.astype(_DTYPES[kind], copy=False)


def filters(op: str, at: Place = HOST, **values: Any) -> dict[str, AnyView]:
    """The parameters that are not None, for `_core`."""
    return {
        name: parameter(value, _FILTERS[name], f"[{op}] {name}", at)
        for name, value in values.items()
        if value is not None
    }


def _seed_bits(value: Any, argument: str, at: Place) -> AnyView:
    """Unsigned 64-bit numbers as the int64 of the same bits."""
    if isinstance(value, int):
        return np.array(value % 2**64, np.uint64).view(np.int64)
    return parameter(value, "i", argument, at)


def _fresh_seed(like: Any, generator: Any, argument: str) -> int:
    torch = sys.modules.get("torch")
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(2**63))
    if torch is not None:
        default = generator is None and isinstance(like, torch.Tensor)
        if isinstance(generator, torch.Generator) and generator.device.type != "cpu":
            raise InvalidArgumentError(
                f"{argument}: expected a generator of the CPU, as a seed is drawn from it before "
                f"the call, got one of {generator.device}; or give a seed"
            )
        if default or isinstance(generator, torch.Generator):
            return int(torch.randint(2**63 - 1, (1,), generator=generator))
    if generator is None:
        return int.from_bytes(os.urandom(8), "little")
    raise InvalidArgumentError(
        f"{argument}: expected a numpy.random.Generator or a torch.Generator, "
        f"got {type(generator).__name__}"
    )


def seeds_of(
    op: str, like: Any, generator: Any, seed: Any, offset: Any, at: Place = HOST
) -> tuple[AnyView, AnyView]:
    """The seed and the offset: given, or a fresh seed at the offset 0."""
    if seed is None:
        seed = _fresh_seed(like, generator, f"[{op}] generator")
    return (
        _seed_bits(seed, f"[{op}] seed", at),
        _seed_bits(0 if offset is None else offset, f"[{op}] offset", at),
    )


def sample(
    op: str,
    kind: str,
    x: Any,
    *,
    indices: Any,
    generator: Any,
    seed: Any,
    offset: Any,
    return_valid: bool = False,
    check_nan: bool = False,
    joint: bool = False,
    pool: ThreadPool | Queue | None,
    **values: Any,
) -> Any:
    """Samples rows of `kind`, "logits" or "probs"; returns what the public functions return."""
    at = place_of(x, pool, f"[{op}] {kind}")
    rows = at.dense(x, f"[{op}] {kind}")
    places = at.optional(indices, f"[{op}] indices")
    dtype = np.dtype(np.int32) if places is None else places.dtype
    if dtype not in (np.int32, np.int64):
        got = arrays.dtype_name(dtype)
        raise InvalidArgumentError(f"[{op}] indices: expected int32 or int64, got {got}")
    seeds = seeds_of(op, x, generator, seed, offset, at)
    count = (rows if places is None else places).shape[:1] or (0,)
    samples, tokens = at.empty(x, count, dtype)
    valid, flags = at.empty(x, count, np.bool_) if return_valid else (None, None)
    if places is not None and not at.on_gpu:
        places = places.astype(np.int64, copy=False)
    _core.sample_rows(
        op,
        kind,
        rows,
        *seeds,
        tokens,
        flags,
        **filters(op, at, **values),
        joint=joint,
        indices=places,
        check_values=check_nan and not return_valid,
        pool=at.executor,
    )
    return (samples, valid) if return_valid else samples


def filter_rows(
    op: str,
    kind: str,
    x: Any,
    out_kind: str,
    *,
    dtype: Any = None,
    joint: bool = False,
    pool: ThreadPool | Queue | None,
    **values: Any,
) -> Any:
    """Filters rows of `kind` into a new array of rows of `out_kind`; default dtype: that of x."""
    at = place_of(x, pool, f"[{op}] {kind}")
    rows = at.dense(x, f"[{op}] {kind}")
    out, view = at.empty(x, rows.shape, dtype)
    _core.filter_rows(
        op,
        kind,
        rows,
        out_kind,
        view,
        **filters(op, at, **values),
        joint=joint,
        pool=at.executor,
    )
    return out
