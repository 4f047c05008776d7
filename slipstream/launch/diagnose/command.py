"""The command `slipstream diagnose`."""

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[cluster] [RUN] [KEY=VALUE...]",
            help="Name or folder of a run, by default the newest; or settings.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/diagnose.md has its keys.")] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="FILE.tar.gz", help="Collect what a bug report needs, without secrets, in a new file."),
    ] = None,
) -> None:
    """Check installation, machine, inputs of a run, and how the last run ended.

    \b
    slipstream diagnose                                            with the settings of the newest run
    slipstream diagnose experiment=gsm8k_1gpu                      with those of a run to be started
    slipstream diagnose --bundle report.tar.gz                     collect that for a bug report
    slipstream diagnose cluster broker.address=tcp://HOST:PORT     a machine that is to join the run of that broker
    slipstream diagnose cluster cluster.interface=10.0.0.0/8       the same without a broker

    Each check has a verdict (ok, warn, fail, skipped) and a remedy. Changes nothing.

    Exit codes: 0, 1 when a check has failed, 2 for settings that are not valid.
    """
    # Imported here: it takes a second, which `slipstream --help` must not wait for.
    from slipstream.launch.diagnose.diagnosis import diagnose as diagnose_all

    diagnose_all(words or [], is_json=json, bundle=bundle)
