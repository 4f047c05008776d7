"""The commands `slipstream launch slurm` and `slipstream launch kubernetes`."""

import secrets
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cluster.kubernetes import (
    ANY_INTERFACE,
    SECRET_KEY,
    Kind,
    Options,
    dump,
    manifests,
    read_patches,
    secret,
    secret_name,
)
from slipstream.cluster.recipe import Recipe, read_recipe, sbatch_script
from slipstream.configs.base import ConfigError, require
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.runtime.command_line import NO_ANSWER, WITH_OVERRIDES, Overrides, Texts, exit_with_error, make_app

_SUBMIT_TIMEOUT_S = 120.0

app = make_app("Start a run by Slurm or on Kubernetes; docs/cluster.md describes both.")
Print = Annotated[bool, typer.Option("--print", help="Print the job instead of submitting it.")]


def _several(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=f"{text}; repeatable.")


@app.command(**WITH_OVERRIDES)
def slurm(
    overrides: Overrides = None,
    print_only: Print = False,
    option: Annotated[Texts, _several("OPTION", "An option of sbatch", "--sbatch")] = None,
    core_option: Annotated[Texts, _several("OPTION", "One for the learner's nodes alone", "--sbatch-core")] = None,
    generator_option: Annotated[
        Texts, _several("OPTION", "One for the generators alone", "--sbatch-generators")
    ] = None,
    python: Annotated[str, typer.Option(metavar="FILE", help="Python of the nodes.")] = sys.executable,
) -> None:
    """Submit a run to Slurm as a batch job, from a folder that all nodes share.

    \b
    slipstream launch slurm cluster.interface=10.0.0.0/8 --sbatch=--partition=gpu --sbatch=--time=24:00:00
    slipstream launch slurm cluster.interface=10.0.0.0/8 --sbatch-core=--partition=h200 --sbatch-generators=--mem=200G
    slipstream launch slurm cluster.interface=10.0.0.0/8 generators.count=8 learner.device=cuda --print

    Exit codes: 0, 1 if sbatch rejects the job, 2 for invalid settings or without sbatch.
    """
    options = {"options": option or (), "core_options": core_option or (), "generator_options": generator_option or ()}
    script = sbatch_script(read_recipe(overrides or [], kind="local"), python=python, **options)
    if print_only:
        print(script, end="")
    else:
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
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Namespace (default: kubectl's).")] = "",
    secret_names: Annotated[Texts, _several("NAME", "Secret of environment variables for the core", "--secret")] = None,
    generator_secret: Annotated[Texts, _several("NAME", "The same for generators, which run other code")] = None,
    pull_secret: Annotated[Texts, _several("NAME", "Secret of the image's registry")] = None,
    service_account: Annotated[str, typer.Option(metavar="NAME", help="Service account of the pods.")] = "",
    node_selector: Annotated[Texts, _several("LABEL=VALUE", "Label of the nodes")] = None,
    toleration: Annotated[Texts, _several("KEY[=VALUE][:EFFECT]", "Tolerated taint of nodes")] = None,
    patch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML to merge into the manifest; see docs/cluster.md.")
    ] = None,
) -> None:
    """Start a run on Kubernetes, as a RayJob or a JobSet.

    \b
    slipstream launch kubernetes --image registry/slipstream:gpu --claim shared experiment=gsm8k_8gpu name=mine
    slipstream launch kubernetes --image registry/slipstream:gpu --kind jobset --print name=mine
    slipstream launch kubernetes --image registry/slipstream:gpu --namespace research --secret aws name=mine

    Exit codes: 0, 1 if kubectl rejects the manifest, 2 for invalid settings or without kubectl.
    """
    recipe = read_recipe(overrides or [], kind="ray" if kind == "rayjob" else "local", interface=ANY_INTERFACE)
    _note_losses(recipe, claim)
    wrong = [each for each in node_selector or () if not each.partition("=")[0] or "=" not in each]
    require(not wrong, "--node-selector", "be LABEL=VALUE", got=wrong, why="nodes are chosen by labels")
    options = Options(
        image,
        claim=claim,
        ray_version=_ray_version() if kind == "rayjob" else "",
        namespace=namespace,
        secrets=secret_names or (),
        generator_secrets=generator_secret or (),
        pull_secrets=pull_secret or (),
        service_account=service_account,
        node_selector=dict(each.split("=", 1) for each in node_selector or ()),
        tolerations=toleration or (),
    )
    documents = manifests(recipe, kind, options, patches=read_patches(patch) if patch else ())
    _start(recipe, "---\n".join(map(dump, documents)), namespace=namespace, is_printed=print_only)


def _note_losses(recipe: Recipe, claim: str | None) -> None:
    if claim is None and recipe.run.storage.uri is None:
        print("note: without --claim and storage.uri, what the run writes is lost with its pods.", file=sys.stderr)
    if claim and isinstance(recipe.run.buffer.store, EmbeddedRedisConfig):
        disks = "Claims for several nodes (ReadWriteMany) are network disks, on which writes can be slow or lost"
        advice = f"{disks}: prefer buffer/store=redis buffer.store.url=..."
        print(f"note: the embedded store writes to the claim {claim}. {advice}", file=sys.stderr)


def _ray_version() -> str:
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "launch kubernetes --kind rayjob needs Ray, in the version of the image, but it is not installed: "
            "`pip install 'slipstream[ray]'`, or choose --kind jobset."
        ) from None


def _start(recipe: Recipe, text: str, *, namespace: str, is_printed: bool) -> None:
    place = [f"--namespace={namespace}"] if namespace else []
    if is_printed:
        make = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        create = ["kubectl", *place, "create", "secret", "generic", secret_name(recipe)]
        print(f"# The Secret with the run's token, once: {make} |")
        print(f"#   {' '.join(create)} --from-file={SECRET_KEY}=/dev/stdin\n{text}", end="")
        return
    there = ["kubectl", "get", "secret", secret_name(recipe), "--ignore-not-found", "--output=name", *place]
    where = "where kubectl reaches the cluster"
    if not _call(there, "", where=where, is_shown=False):
        token = dump(secret(recipe, secrets.token_urlsafe(32)))
        _call(["kubectl", "create", "-f", "-", *place], token, where=where)
    _call(["kubectl", "apply", "-f", "-", *place], text, where=where)


def _call(command: list[str], document: str, *, where: str, is_shown: bool = True) -> str:
    """Pipe a document, which may be secret, to a program; return stdout. Exits with 1 if it fails."""
    why = f"run this {where}, or add --print"
    require(shutil.which(command[0]) is not None, command[0], "be installed to start the run", got="none", why=why)
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
