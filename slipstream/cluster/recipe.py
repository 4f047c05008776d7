"""Recipe: the settings of a run and the overrides of its roles; and its Slurm batch script."""

import shlex
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

from slipstream.configs.base import require
from slipstream.configs.load import load, own_settings
from slipstream.configs.run import RunConfig
from slipstream.runtime.run_folder import RunFolder

STOP_TIMEOUT_S = 180
"""Time for the roles to stop; a checkpoint may take most."""


class Recipe(NamedTuple):
    """A run to start by Slurm or Kubernetes.

    Example: Recipe(load([...]), ["experiment=gsm8k_8gpu", "name=mine", "resume=auto"], ["experiment=gsm8k_8gpu",
        "name=mine"])
    """

    run: RunConfig
    settings: list[str]
    """Overrides of broker and learner."""
    own: list[str]
    """Overrides of generators, without the broker's address."""


def read_recipe(overrides: list[str], *, kind: str, interface: str = "") -> Recipe:
    """Resolve settings. Raises ConfigError.

    `kind`: `ray`, or `local` if the manifest places the roles. `interface`: default of cluster.interface.
    """
    settings = [text for text in overrides if _key(text) != "cluster.kind"]
    run = load(settings)
    if interface and not run.cluster.interface:
        settings.append(f"cluster.interface={interface}")
    must, why = "name the network that the machines share, such as 10.0.0.0/8", "roles could not reach each other"
    require(bool(run.cluster.interface or interface), "cluster.interface", must, got='""', why=why)
    settings = [text for text in settings if _key(text) != "name"] + [f"name={run.name}"]
    if not any(_key(text) == "resume" for text in settings):
        settings.append("resume=auto")
    # With kind=ray, because the manifest reserves the same resources as Ray.
    run = load([*settings, "cluster.kind=ray"])
    own = [*own_settings(settings), f"name={run.name}"]
    return Recipe(run, [*settings, "cluster.kind=ray"] if kind == "ray" else settings, own)


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def sbatch_script(
    recipe: Recipe,
    *,
    python: str,
    options: Sequence[str] = (),
    core_options: Sequence[str] = (),
    generator_options: Sequence[str] = (),
) -> str:
    """Return a batch script: broker, store, and rank 0 on the first node; other roles as tasks.

    `options`: sbatch options for both job parts, the others for one.
    """
    run = recipe.run
    core, generator, count = run.cluster.learner, run.cluster.generator, run.generators.count
    # Roles use the first ports. Jobs may share a node, so rendezvous ports vary.
    ports = run.cluster.port_range
    meet = ports[len(ports) // 2 :]
    nodes = [f"--nodes={core.machines}", f"--ntasks={core.machines}", "--ntasks-per-node=1"]
    nodes += [f"--cpus-per-task={ceil(core.cpus)}"]
    nodes += [f"--gpus-per-node={run.learner_gpus}"] if run.learner_gpus else []
    nodes += [f"--mem={ceil(core.memory_gib * 1024)}M"] if core.memory_gib else []
    tasks = [f"--ntasks={count}", f"--cpus-per-task={ceil(generator.cpus)}"]
    tasks += [f"--gpus-per-task={run.generator_gpus}"] if run.generator_gpus else []
    if generator.memory_gib:
        # Slurm knows no memory of a task.
        tasks.append(f"--mem-per-cpu={ceil(generator.memory_gib * 1024 / ceil(generator.cpus))}M")
    # Slurm selects nodes by features, which have no values.
    tasks += [f"--constraint={'&'.join(generator.labels.values())}"] if generator.labels else []
    job = [f"--job-name={run.name}", f"--output={run.name}-%j.log", "--open-mode=append", "--requeue"]
    # The roles end and the job is requeued this long before its limit.
    job += [f"--signal=B:USR1@{STOP_TIMEOUT_S}"]
    variables = {
        "python": shlex.quote(python),
        "folder": shlex.quote(str(RunFolder(run).path)),
        "settings": _array(recipe.settings),
        "own": _array(recipe.own),
        "core": _array(["--het-group=0", *nodes]),
        "generators": _array(["--het-group=1", *tasks]),
        "meet_from": str(meet[0]),
        "meet_ports": str(len(meet)),
    }
    first, second = (*job, *nodes, *options, *core_options), (*tasks, *options, *generator_options)
    body = Path(__file__).with_name("slurm.sh").read_text("utf-8")
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in first), "#SBATCH hetjob"]
    lines += [f"#SBATCH {option}" for option in second]
    lines += [f"# Run {run.name}, by `slipstream launch slurm`: learner on {core.machines} nodes, {count} generators."]
    lines += ["", *(f"{name}={value}" for name, value in variables.items())]
    return "\n".join(lines) + f"\n\n{body}"


def _array(words: Sequence[str]) -> str:
    return f"({shlex.join(words)})"
