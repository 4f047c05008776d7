"""The commands `slipstream data` and `slipstream view`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import run_app


def data(ctx: typer.Context) -> None:
    """List, show, export, import and verify stored trajectories."""
    from slipstream.buffer.cli.app import app

    run_app(app, ctx.args, program=ctx.command_path)


def view(
    where: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A run's name or folder, an archive, a file of `data export`, or a redis:// address."
        ),
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json or its folder, instead of the run's.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run, beside a redis:// address.")] = None,
    runs_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the run folders.")] = Path("runs"),
) -> None:
    """Look through trajectories in the terminal; `?` lists the keys.

    Search, filter and sort; tokens coloured by advantage or lag; a group side by side. Reads alone, whichever role of
    the run is dead.

    \b
    slipstream view runs/mine
    slipstream view good.parquet --tokenizer models/mine
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "slipstream view must run in a terminal, got a pipe or a file: `slipstream data ls` prints trajectories."
        )
    # Imported here: Textual and Arrow take half a second, which other commands do without.
    from slipstream.buffer.catalog.catalog import open_catalog
    from slipstream.viewer.list_screen import ViewerApp

    with open_catalog(where, run_name=run, runs_dir=runs_dir, tokenizer=tokenizer) as catalog:
        ViewerApp(catalog, name=where).run()
