"""The families that there are, and which one a model belongs to."""

from collections.abc import Iterable

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.models import bitnet, gemma, llama, qwen
from effinfer.models.config import ModelConfig
from effinfer.models.family import Family

# Families by ModelConfig.architecture.
FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (
        llama,
        qwen,
        gemma,
        bitnet,
    )
    for family in module.FAMILIES
}
_OF_GGUF_NAME = {name: family for family in FAMILIES.values() for name in family.gguf_names}
_OF_MODEL_TYPE = {kind: family for family in FAMILIES.values() for kind in family.model_types}
_OF_HF_CLASS = {name: family for family in FAMILIES.values() for name in family.hf_classes}


def family_of(architecture: str) -> Family:
    """The family of a ModelConfig.architecture. Throws UnsupportedError for an unknown one."""
    if architecture not in FAMILIES:
        raise _unknown("architecture", FAMILIES, architecture)
    return FAMILIES[architecture]


def family_of_gguf(name: str) -> Family:
    """The family of a general.architecture in GGUF metadata. Throws UnsupportedError for an unknown
    one."""
    if name not in _OF_GGUF_NAME:
        raise _unknown("architecture", _OF_GGUF_NAME, name)
    return _OF_GGUF_NAME[name]


def family_of_folder(fields: Fields) -> Family:
    """The family that a config.json tells. Throws UnsupportedError for an unknown model_type,
    FormatError for a key that is missing or of another type."""
    model_type = fields.text("model_type")
    if model_type not in _OF_MODEL_TYPE:
        raise _unknown("model_type", _OF_MODEL_TYPE, model_type)
    claimed = (_OF_HF_CLASS.get(name) for name in fields.texts("architectures"))
    return next((family for family in claimed if family), _OF_MODEL_TYPE[model_type])


def gguf_name(config: ModelConfig) -> str:
    """What GGUF files call the architecture of a model."""
    names = FAMILIES[config.architecture].gguf_names
    fitting = (name for name, activation in names.items() if activation == config.activation)
    return next(fitting, config.architecture)


def _unknown(what: str, known: Iterable[str], given: str) -> _core.UnsupportedError:
    return _core.UnsupportedError(f"[load] {what}: expected one of {sorted(known)}, got {given!r}")
