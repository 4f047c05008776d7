"""The command `slipstream import-config`."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.migration.documents import read_settings
from slipstream.migration.translation import Imported
from slipstream.migration.trl import import_trl
from slipstream.migration.verl import import_verl

_IMPORTERS = {"verl": import_verl, "trl": import_trl}


def import_config(
    trainer: Annotated[Literal["verl", "trl"], typer.Argument(metavar="TRAINER", help="Whose settings they are.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML, JSON, Hydra's overrides.yaml, or the shell script of a run.")
    ],
) -> None:
    """Translate the settings of another trainer.

    \b
    slipstream import-config verl run_qwen2-7b.sh
    slipstream import-config trl grpo.yaml

    Prints the command that trains with them here, what means something else, and every setting without an equal;
    docs/migration.md has the words of both sides.
    """
    imported = import_settings(trainer, file)
    settings = [shlex.quote(override) for override in imported.overrides]
    print(" \\\n  ".join(["slipstream run", *settings]))
    for title, lines in (("Mind", imported.notes), ("No equal here", imported.without_equal)):
        if lines:
            print(f"\n{title}:", *(f"  {line}" for line in lines), sep="\n")


def import_settings(trainer: str, file: Path) -> Imported:
    """Translate a file; settings that do not fit each other here are a note. Raises ConfigError."""
    given = read_settings(file)
    try:
        imported = _IMPORTERS[trainer](given)
    except ConfigError:
        raise
    # Text where they have a number: a variable of the environment, which may hold a secret, is not filled in.
    except (TypeError, ValueError) as error:
        unset = [f"{key}={value}" for key, value in given.items() if isinstance(value, str) and "$" in value]
        raise ConfigError(
            f"FILE must hold the values of its settings, got {file} with {', '.join(unset) or error}: write numbers in "
            "place of variables that it does not set."
        ) from None
    try:
        load(imported.overrides)
    except ConfigError as error:
        problems = " ".join(str(error).splitlines())
        return Imported(
            imported.overrides, [*imported.notes, f"to be settled first: {problems}"], imported.without_equal
        )
    return imported
