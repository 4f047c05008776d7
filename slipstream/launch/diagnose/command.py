"""The command `slipstream diagnose`."""

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[cluster] [RUN] [KEY=VALUE...]",
            help="Name or folder of a run (default: the newest); or settings.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/diagnose.md has its keys.")] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="FILE.tar.gz", help="Write a file for a bug report, without secrets."),
    ] = None,
) -> None:
    """Check installation, machine, run inputs, and the last run.

    \b
    slipstream diagnose                                            with the settings of the newest run
    slipstream diagnose experiment=gsm8k_1gpu                      with the settings of a new run
    slipstream diagnose --bundle report.tar.gz                     collect everything for a bug report
    slipstream diagnose cluster broker.address=tcp://HOST:PORT     a machine that will join that broker
    slipstream diagnose cluster cluster.interface=10.0.0.0/8       the same without a broker

    Each check has a verdict (ok, warn, fail, skipped) and a remedy. Changes nothing.

    Exit codes: 0, 1 when a check has failed, 2 for settings that are not valid.
    """
    # Imported here because it takes a second, which would delay `slipstream --help`.
    from slipstream.launch.diagnose.diagnosis import diagnose as diagnose_all

    diagnose_all(words or [], is_json=json, bundle=bundle)
