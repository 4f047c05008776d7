"""Slurm batch script: broker, store, and rank 0 on the first node; further ranks and generators as tasks."""

import shlex
from collections.abc import Sequence
from math import ceil

from slipstream.cluster.recipe import STOP_TIMEOUT_S, Recipe
from slipstream.runtime.run_folder import RunFolder

_BODY = r"""
set -um
umask 077
stopping='' requeue=''
trap 'stopping=1 requeue=1' USR1
trap 'stopping=1' TERM

# Runs a role, and restarts it after errors that a restart may fix: NAME COMMAND...
restarted() {
    local name=$1 code delay stopped=''
    shift
    trap 'stopped=1' TERM
    for delay in 1 2 4 8 16 0; do
        "$@"
        code=$?
        # 2 is a permanent error.
        [[ -n $stopped || $code == 0 || $code == 2 || $delay == 0 ]] && break
        echo "$name ended with $code; restarting in $delay s" >&2
        sleep "$delay"
    done
    return "$code"
}

"$python" -m slipstream prepare "${settings[@]}" || exit

# Delete the old address: this job's broker may run on another node.
rm -f "$folder/address"
restarted broker "$python" -m slipstream.broker "${settings[@]}" &
broker=$!
deadline=$((SECONDS + 600))
until [[ -s $folder/address ]]; do
    if ! kill -0 "$broker" 2>/dev/null || ((SECONDS > deadline)) || [[ -n $stopping ]]; then
        echo "error: the broker must write $folder/address within 600 s, but did not" >&2
        kill -TERM -- "-$broker" 2>/dev/null
        wait "$broker"
        exit 1
    fi
    sleep 0.2
done
address=$(<"$folder/address")
meeting=${address#tcp://}
export MASTER_ADDR=${meeting%:*} MASTER_PORT=$((meet_from + SLURM_JOB_ID % meet_ports))
# In the environment, because every user of a node can read command lines.
export SLIPSTREAM_TOKEN=${SLIPSTREAM_TOKEN:-$(<"$folder/token")}

# The tasks expand these scripts.
# shellcheck disable=SC2016
restarted learner srun "${core[@]}" --label --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_PROCID exec "$@"' learner "$python" -m slipstream.learner "${settings[@]}" &
learner=$!
# shellcheck disable=SC2016
srun "${generators[@]}" --label --kill-on-bad-exit=0 --wait=0 \
    bash -c "$(declare -f restarted)"'
        export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
        restarted "generator-$SLURM_PROCID" "$@" --id "generator-$SLURM_PROCID"
    ' generators "$python" -m slipstream.generators "${own[@]}" "broker.address=$address" &
others=$!

while [[ -z $stopping ]] && kill -0 "$broker" 2>/dev/null && kill -0 "$learner" 2>/dev/null; do
    sleep 0.5
done
trap '' USR1 TERM
# The broker ends last, because the other roles say goodbye to it.
kill -TERM -- "-$others" "-$learner" 2>/dev/null
wait "$learner"
code=$?
wait "$others"
kill -TERM -- "-$broker" 2>/dev/null
wait "$broker"
if [[ -n $requeue ]]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
exit "$code"
"""


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
    # Roles use the first ports. Rendezvous ports vary by job, because jobs may share a node.
    ports = run.cluster.port_range
    meet = ports[len(ports) // 2 :]
    nodes = [f"--nodes={core.machines}", f"--ntasks={core.machines}", "--ntasks-per-node=1"]
    nodes += [f"--cpus-per-task={recipe.core_cpus}", *([f"--gpus-per-node={core.gpus}"] if core.gpus else [])]
    nodes += [f"--mem={ceil(core.memory_gib * 1024)}M"] if core.memory_gib else []
    tasks = [f"--ntasks={count}", f"--cpus-per-task={recipe.generator_cpus}"]
    tasks += [f"--gpus-per-task={generator.gpus}"] if generator.gpus else []
    if generator.memory_gib:
        # Slurm knows no memory of a task.
        tasks.append(f"--mem-per-cpu={ceil(generator.memory_gib * 1024 / recipe.generator_cpus)}M")
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
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in first), "#SBATCH hetjob"]
    lines += [f"#SBATCH {option}" for option in second]
    lines += [
        f"# Run {run.name}, by `slipstream launch slurm`: learner on {core.machines} nodes, {count} generators.",
        "",
    ]
    return "\n".join([*lines, *(f"{name}={value}" for name, value in variables.items())]) + "\n" + _BODY


def _array(words: Sequence[str]) -> str:
    return f"({shlex.join(words)})"
