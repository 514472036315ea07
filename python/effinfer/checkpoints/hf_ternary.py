"""Ternary weights of Hugging Face folders, as i2_s tensors.

transformers' BitNet integration stores a linear layer in one of these forms
(`quantization_config` of config.json, "quant_method": "bitnet"):

- packed: `weight` uint8 [N / 4, K], where bits 2 p .. 2 p + 1 of byte (r, k) are w + 1 of row
  p N / 4 + r, and `weight_scale` [1], which divides the sums (linear_class "bitlinear", the
  default) or multiplies them ("autobitlinear");
- unpacked: `weight` of floats -1, 0, 1, with a `weight_scale` as above;
- master weights (quantization_mode "online"): floats, made ternary by their absolute mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.files.safetensors_files import DTYPES, to_float32
from effinfer.models.bitnet import FIRST_CLASS

Bytes = npt.NDArray[np.uint8]
_BLOCK = 128  # weights of an i2_s block: four fields of 32, from the top bits down
_TAIL = 32  # bytes behind the blocks, which begin with the float32 scale


@dataclass(frozen=True)
class TernaryFormat:
    """How a folder stores its ternary layers."""

    online: bool = False
    scale_divides: bool = True
    excluded: tuple[str, ...] = ()  # modules that stay as they are

    def converts(self, module: str) -> bool:
        """Whether the master weights of a module, by its name in the folder, become ternary."""
        names = (*self.excluded, "lm_head")
        return not any(module == name or module.startswith(f"{name}.") for name in names)


def ternary_format(config: Mapping[str, Any]) -> TernaryFormat | None:
    """The format that config.json tells; None for a model that is not quantised. Throws
    UnsupportedError for another method."""
    facts = Fields.of(config, "config.json")
    section = facts.section("quantization_config")
    if not section:
        # The first checkpoints hold master weights and do not say so.
        is_first = FIRST_CLASS in facts.texts("architectures")
        return TernaryFormat(online=True) if is_first else None
    quantization = Fields.of(section, "config.json", "quantization_config.")
    method = quantization.text("quant_method")
    if method != "bitnet":
        raise _core.UnsupportedError(
            f"[load] quantization_config.quant_method: expected 'bitnet', got {method!r}"
        )
    automatic = quantization.text("linear_class", "bitlinear") == "autobitlinear"
    return TernaryFormat(
        online=automatic and quantization.text("quantization_mode", "offline") == "online",
        scale_divides=not automatic,
        excluded=tuple(quantization.texts("modules_to_not_convert")),
    )


class TernaryLayers:
    """Collects the tensors of ternary layers, whose scales may lie in other files, and converts
    them when all are there."""

    def __init__(self, form: TernaryFormat) -> None:
        self._form = form
        self._scales: dict[str, float] = {}  # by module
        self._weights: dict[str, tuple[str, str, list[int], Any]] = {}
        self._origins: dict[str, tuple[Path, int]] = {}

    def take(
        self,
        name: str,
        target: str | None,
        kind: str,
        shape: list[int],
        data: Any,
        origin: tuple[Path, int],
    ) -> bool:
        """Whether a tensor may belong to a ternary layer. `target` is its GGUF name, None for a
        tensor that the decoder does not use; `origin` its file and where it lies there."""
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_scale":
            self._scales[module] = self._read_scale(name, kind, data)
            return True
        is_layer = target is not None and target.startswith("blk.") and suffix == "weight"
        if not is_layer or len(shape) != 2:
            return False
        online = self._form.online and self._form.converts(module)
        if kind == "U8" or (kind in DTYPES and (online or not self._form.online)):
            self._weights[module] = (str(target), kind, shape, data)
            self._origins[module] = origin
            return True
        return False

    def add_to(self, weights: _core.MemoryWeights) -> None:
        """Converts what was taken. Throws FormatError for a packed matrix without a scale."""
        for module, (target, kind, shape, data) in self._weights.items():
            name, scale = f"{module}.weight", self._scales.get(module)
            if kind == "U8":
                if scale is None:
                    raise _core.FormatError(f"[load] {module}.weight_scale: missing")
                packed = from_packed(name, data.reshape(shape), scale)
            elif scale is not None:
                packed = from_ternary(name, to_float32(data, DTYPES[kind]).reshape(shape), scale)
            elif self._form.online:
                packed = from_master(name, to_float32(data, DTYPES[kind]).reshape(shape))
            else:  # a layer that was left as it is
                path, offset = self._origins[module]
                weights.add(target, data, DTYPES[kind], shape, path=path, offset=offset)
                continue
            weights.add(target, packed[0], "i2_s", packed[1])

    def _read_scale(self, name: str, kind: str, data: Any) -> float:
        values = to_float32(data, DTYPES[kind]) if kind in DTYPES else np.zeros(0, np.float32)
        if values.size != 1 or not np.isfinite(values[0]) or values[0] == 0:
            raise _core.FormatError(f"[load] {name}: expected one finite number that is not 0")
        return float(np.float32(1) / values[0] if self._form.scale_divides else values[0])


def from_packed(name: str, packed: Bytes, scale: float) -> tuple[Bytes, list[int]]:
    """i2_s bytes and shape of a packed matrix, uint8 [N / 4, K]. `scale` multiplies the sums."""
    rows, cols = _shape(name, packed)
    if (packed & (packed >> 1) & 0x55).any():
        raise _core.FormatError(f"[load] {name}: a code that is none of -1, 0, 1")
    fields = packed.reshape(rows, cols // _BLOCK, 4, 32)
    out, body = _allocate(rows * 4, cols, scale)
    quarters = body.reshape(4, rows, cols // _BLOCK, 32)
    for quarter in range(4):
        for field in range(4):
            codes = (fields[:, :, field] >> (2 * quarter)) & 3
            quarters[quarter] |= codes << (6 - 2 * field)
    return out, [rows * 4, cols]


def from_ternary(
    name: str, weight: npt.NDArray[np.float32], scale: float
) -> tuple[Bytes, list[int]]:
    """i2_s bytes and shape of a matrix [N, K] of -1, 0 and 1."""
    if not np.isin(weight, (-1.0, 0.0, 1.0)).all():
        raise _core.FormatError(f"[load] {name}: expected -1, 0 and 1 beside a weight_scale")
    return _from_codes(name, (weight + 1).astype(np.uint8), scale)


def from_master(name: str, weight: npt.NDArray[np.float32]) -> tuple[Bytes, list[int]]:
    """i2_s bytes and shape of master weights [N, K]: round(w / mean |w|), within -1..1, times that
    mean (Ma et al. 2024, equations 1 to 3)."""
    mean = np.float32(max(np.abs(weight).mean(dtype=np.float64), 1e-5))
    if not np.isfinite(mean):
        raise _core.FormatError(f"[load] {name}: not all weights are finite")
    codes = np.rint(weight * (np.float32(1) / mean))
    np.clip(codes, -1, 1, out=codes)
    codes += 1
    return _from_codes(name, codes.astype(np.uint8), float(mean))


def _from_codes(name: str, codes: Bytes, scale: float) -> tuple[Bytes, list[int]]:
    rows, cols = _shape(name, codes)
    fields = codes.reshape(-1, 4, 32)
    out, body = _allocate(rows, cols, scale)
    blocks = body.reshape(-1, 32)
    for field in range(4):
        blocks |= fields[:, field] << (6 - 2 * field)
    return out, [rows, cols]


def _shape(name: str, matrix: npt.NDArray[Any]) -> tuple[int, int]:
    if matrix.ndim != 2 or matrix.shape[1] % _BLOCK != 0:
        raise _core.UnsupportedError(
            f"[load] {name}: expected a matrix whose columns are a multiple of {_BLOCK}, got "
            f"{list(matrix.shape)}"
        )
    return matrix.shape[0], matrix.shape[1]


def _allocate(rows: int, cols: int, scale: float) -> tuple[Bytes, Bytes]:
    """Zeroed bytes of a tensor with its scale set, and a view of its blocks."""
    out = np.zeros(rows * cols // 4 + _TAIL, np.uint8)
    out[-_TAIL:][:4].view(np.float32)[0] = scale
    return out, out[:-_TAIL]
