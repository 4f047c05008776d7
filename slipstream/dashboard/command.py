"""The command `slipstream watch`."""

from typing import Annotated

import typer


def watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Names or folders of runs, by default all; runs_dir=FOLDER says where runs are."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="By default 8420, or a free one.")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name of this machine; repeatable.")
    ] = None,
) -> None:
    """Show runs in a web browser, live and finished.

    \b
    slipstream watch                          all runs in runs/
    slipstream watch mine --port 9000         one of them

    Prints the address to open. Reads stores and run folders alone: it works whichever role is dead.
    """
    # Imported here: no other command waits for the web server's libraries.
    from slipstream.dashboard.server import watch as serve

    serve(runs or [], host=host, port=port, names=allow_host or [])
