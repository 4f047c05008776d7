"""Slurm batch script: broker, store, and rank 0 on the first node; other roles as tasks."""

import shlex
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from slipstream.cluster.recipe import STOP_TIMEOUT_S, Recipe
from slipstream.runtime.run_folder import RunFolder


def sbatch_script(
    recipe: Recipe,
    *,
    python: str,
    options: Sequence[str] = (),
    core_options: Sequence[str] = (),
    generator_options: Sequence[str] = (),
) -> str:
    """Return the script; `options`: sbatch options for both job parts, the others for one."""
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
