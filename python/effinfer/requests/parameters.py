"""The sampling parameters of a call: an object, keywords, or what the model's makers recommend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from effinfer import _core
from effinfer.foreign_names import check_names, hint
from effinfer.sampling import SamplingParams

Recommended = Callable[[], SamplingParams]

_NAMES = [field.name for field in fields(SamplingParams)]


def complete(
    params: SamplingParams | None, keywords: Mapping[str, Any], recommended: Recommended
) -> SamplingParams:
    """`params` as they are, or where there are none what is recommended, with the keywords in
    place of its fields. Throws InvalidArgumentError for a keyword that is no field."""
    check_names(keywords, _NAMES)
    if params is None:
        params = recommended()
    elif not isinstance(params, SamplingParams):
        raise _core.InvalidArgumentError(
            f"[generate] params: expected SamplingParams, got {type(params).__name__}"
        )
    return replace(params, **keywords) if keywords else params


def complete_all(
    params: SamplingParams | Sequence[SamplingParams] | None,
    keywords: Mapping[str, Any],
    recommended: Recommended,
) -> SamplingParams | list[SamplingParams]:
    """complete() of one for all prompts, or of one a prompt."""
    if not isinstance(params, list | tuple):
        return complete(params, keywords, recommended)  # type: ignore[arg-type]
    return [complete(each, keywords, recommended) for each in params]


def split_variables(variables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of chat(): sampling parameters, and what the template gets. Throws
    InvalidArgumentError for a name that another library gives a parameter."""
    sampling = {name: value for name, value in variables.items() if name in _NAMES}
    rest = {name: value for name, value in variables.items() if name not in _NAMES}
    check_names([name for name in rest if hint(name)], _NAMES)
    return sampling, rest
