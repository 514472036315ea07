"""The commands' help: flags without a type."""

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


def tidy(parameters: list[Any]) -> list[Any]:
    """Flags take no value: none is named in the help."""
    for parameter in parameters:
        takes_none = isinstance(parameter, TyperOption) and (parameter.is_flag or parameter.count)
        if takes_none and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return tidy(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return tidy(super().get_params(ctx))
