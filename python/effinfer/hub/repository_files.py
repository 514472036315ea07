"""Which files of a hub repository a name stands for."""

import re
from collections.abc import Sequence

from effinfer import _core
from effinfer.hub.repository_name import Name

# Of several types the first that is there: small, and close to what was trained.
_USUAL = ("Q4_K_M", "Q4_1", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
_TYPE = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|T2|BF16|F16|F32|I2_S))(?=[-._/]|$)", re.IGNORECASE
)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
# Of a folder: weights, configuration, tokenizer, template.
_PARTS_OF_FOLDER = re.compile(r"[^/]+\.(safetensors|json|jinja)")


def choose(name: Name, files: Sequence[str]) -> list[str]:
    """The files of a repository that `name` stands for: one GGUF file, or all of its shards, the
    first of them first; or the parts of a folder, its config.json first. Throws FileError that
    lists what there is."""
    if name.file is not None:
        if name.file not in files:
            raise _core.FileError(f"[load] {name}: the repository has no such file")
        return _shards(name.file, files)
    # Projectors and importance matrices are no models.
    models = [
        file
        for file in files
        if file.endswith(".gguf") and not re.search("mmproj|imatrix", file, re.I)
    ]
    if models:
        return _shards(_of_type(name, models), files)
    if name.tag is not None or "config.json" not in files:
        raise _core.FileError(
            f"[load] {name}: expected GGUF files"
            + ("" if name.tag else ", or a config.json with safetensors")
            + " in the repository"
        )
    parts = [file for file in files if _PARTS_OF_FOLDER.fullmatch(file)]
    named = [file for file in parts if file.startswith("model")]
    if any(file.endswith(".safetensors") for file in named):  # others repeat the weights
        parts = [f for f in parts if f in named or not f.endswith(".safetensors")]
    return sorted(parts, key=lambda file: file != "config.json")


def _of_type(name: Name, models: Sequence[str]) -> str:
    """The GGUF file of the tag, or else of the first usual type."""
    by_type: dict[str, list[str]] = {}
    for file in models:
        found = _TYPE.search(file.removesuffix(".gguf"))
        by_type.setdefault(found[1].upper() if found else "", []).append(file)
    tags = [name.tag.upper()] if name.tag else list(_USUAL)
    for tag in tags:
        if tag in by_type:
            return min(by_type[tag])
    first = {_SPLIT.sub(r"\g<stem>", file) for file in models}
    if name.tag is None and len(first) == 1:
        return min(models)
    known = ", ".join(sorted(kind for kind in by_type if kind)) or ", ".join(sorted(models))
    raise _core.FileError(f"[load] {name}: expected one of {known}, as in {name.repo}:TYPE")


def _shards(file: str, files: Sequence[str]) -> list[str]:
    found = _SPLIT.fullmatch(file)
    if found is None:
        return [file]
    count = int(found["parts"])
    names = [f"{found['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    missing = [each for each in names if each not in files]
    if missing:
        raise _core.FileError(f"[load] {file}: the repository lacks {missing[0]}")
    return names
