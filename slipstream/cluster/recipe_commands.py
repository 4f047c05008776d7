"""The commands `slipstream launch slurm` and `slipstream launch kubernetes`."""

import secrets
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Annotated

import typer

from slipstream.cluster.kubernetes import ANY_INTERFACE, SECRET_KEY, Kind, dump, manifest, secret, secret_name
from slipstream.cluster.recipe import read_recipe
from slipstream.cluster.slurm import sbatch_script
from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import NO_ANSWER, WITH_OVERRIDES, Overrides, exit_with_error, make_app

_SUBMIT_TIMEOUT_S = 120.0

app = make_app("Start a run by Slurm or on Kubernetes; docs/cluster.md describes both.")
Print = Annotated[bool, typer.Option("--print", help="Print the job instead of submitting it.")]


@app.command(**WITH_OVERRIDES)
def slurm(
    overrides: Overrides = None,
    print_only: Print = False,
    option: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="An option of sbatch; repeatable.")
    ] = None,
    python: Annotated[str, typer.Option(metavar="FILE", help="Python of the nodes.")] = sys.executable,
) -> None:
    """Submit a run to Slurm as a batch job, from a folder that all nodes share.

    \b
    slipstream launch slurm cluster.interface=10.0.0.0/8 --sbatch=--partition=gpu --sbatch=--time=24:00:00
    slipstream launch slurm cluster.interface=10.0.0.0/8 generators.count=8 cluster.generator.gpus=1 --print

    Exit codes: 0, 1 if sbatch rejects the job, 2 for invalid settings or without sbatch.
    """
    script = sbatch_script(read_recipe(overrides or [], kind="local"), python=python, options=option or ())
    if print_only:
        print(script, end="")
        return
    _call(["sbatch"], script, where="where Slurm's commands are")


@app.command(**WITH_OVERRIDES)
def kubernetes(
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image, made of the Dockerfile.")],
    overrides: Overrides = None,
    print_only: Print = False,
    kind: Annotated[Kind, typer.Option(help="RayJob of KubeRay, or JobSet.")] = "rayjob",
    claim: Annotated[
        str | None, typer.Option(metavar="NAME", help="PersistentVolumeClaim with data, models and runs, of all pods.")
    ] = None,
) -> None:
    """Start a run on Kubernetes, as a RayJob or a JobSet.

    \b
    slipstream launch kubernetes --image registry/slipstream:gpu --claim shared experiment=gsm8k_8gpu name=mine
    slipstream launch kubernetes --image registry/slipstream:gpu --kind jobset --print name=mine

    Exit codes: 0, 1 if kubectl rejects the manifest, 2 for invalid settings or without kubectl.
    """
    recipe = read_recipe(overrides or [], kind="ray" if kind == "rayjob" else "local", interface=ANY_INTERFACE)
    if claim is None and recipe.run.storage_uri is None:
        print("note: without --claim and storage_uri, what the run writes is lost with its pods.", file=sys.stderr)
    try:
        ray_version = metadata.version("ray") if kind == "rayjob" else ""
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "launch kubernetes --kind rayjob needs Ray, in the version of the image, but it is not installed: "
            "`pip install 'slipstream[ray]'`, or choose --kind jobset."
        ) from None
    document = manifest(recipe, kind, image=image, claim=claim, ray_version=ray_version)
    if print_only:
        make = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        print(f"# The Secret with the run's token, once: {make} |")
        print(f"#   kubectl create secret generic {secret_name(recipe)} --from-file={SECRET_KEY}=/dev/stdin")
        print(dump(document), end="")
        return
    there = ["kubectl", "get", "secret", secret_name(recipe), "--ignore-not-found", "--output=name"]
    where = "where kubectl reaches the cluster"
    if not _call(there, "", where=where, is_shown=False):
        _call(["kubectl", "create", "-f", "-"], dump(secret(recipe, secrets.token_urlsafe(32))), where=where)
    _call(["kubectl", "apply", "-f", "-"], dump(document), where=where)


def _call(command: list[str], document: str, *, where: str, is_shown: bool = True) -> str:
    """Pipe a document, which may be secret, to a program; return stdout.

    Raises ConfigError without the program; exits with 1 if it fails.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} must be installed to start the run, but is not: run this {where}, or add --print."
        )
    try:
        done = subprocess.run(
            command, input=document, capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        exit_with_error(f"{command[0]} must answer within {_SUBMIT_TIMEOUT_S:g} s, but did not.", code=NO_ANSWER)
    if done.returncode:
        exit_with_error(f"{' '.join(command[:2])} must succeed, got: {done.stderr.strip()}", code=NO_ANSWER)
    if is_shown:
        print(done.stdout, end="")
    return done.stdout
