"""The options that every command filters by."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from buffer.archive.stored_trajectory import PLACES
from buffer.archive.trajectory_filter import TrajectoryFilter
from configs.base import ConfigError


def _outcome(value: str | None) -> str | None:
    if value not in (None, *PLACES):
        raise ConfigError(f"--outcome must be one of {', '.join(PLACES)}, got {value!r}.")
    return value


OPTIONS: dict[str, Any] = {
    "min_reward": Annotated[float | None, typer.Option(help="Least total reward.")],
    "max_reward": Annotated[float | None, typer.Option(help="Greatest total reward.")],
    "min_tokens": Annotated[int | None, typer.Option(help="Fewest tokens, prompt and response.")],
    "max_tokens": Annotated[int | None, typer.Option(help="Most tokens, prompt and response.")],
    "version": Annotated[int | None, typer.Option(help="Policy version that sampled some of it.")],
    "step": Annotated[int | None, typer.Option(help="Step that trained on it.")],
    "data_source": Annotated[str | None, typer.Option(help="Kind of task, whole name.")],
    "outcome": Annotated[str | None, typer.Option(help=f"{', '.join(PLACES)}.", callback=_outcome)],
    "text": Annotated[str | None, typer.Option(help="Part of the decoded text.")],
}
"""Field of TrajectoryFilter -> its option."""


def with_filters(command: Callable[..., None]) -> Callable[..., None]:
    """Add the filter options to a command; it gets them as one TrajectoryFilter, its argument `wanted`."""
    own = inspect.signature(command)

    def filtered(**arguments: Any) -> None:
        fields = {name: arguments.pop(name) for name in OPTIONS}
        command(**arguments, wanted=TrajectoryFilter(**fields))

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in OPTIONS.items()
    ]
    kept = [parameter for parameter in own.parameters.values() if parameter.name != "wanted"]
    filtered.__name__, filtered.__doc__ = command.__name__, command.__doc__
    filtered.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    filtered.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *options)}
    return filtered
