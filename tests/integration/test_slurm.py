"""The batch script runs, with stand-ins for srun and scontrol that run every task on this machine."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cluster.recipe import read_recipe, sbatch_script
from tests import runs
from tests.runs import ROOT, SMALL, until

TOKEN = "a-token-that-no-command-line-shows-at-all"
SRUN = """#!/bin/bash
echo "srun $*" >>"$CALLS"
tasks=1
while [[ $1 == -* ]]; do
    [[ $1 == --ntasks=* ]] && tasks=${1#*=}
    [[ $1 == --cpus-per-task=* ]] && export SLURM_CPUS_PER_TASK=${1#*=}
    shift
done
for ((number = 0; number < tasks; number++)); do
    SLURM_PROCID=$number "$@" &
    pids+=($!)
done
# Slurm signals the tasks, which here are in this process group and have heard it.
trap : TERM
highest=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
    ((code > highest)) && highest=$code
done
exit "$highest"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$CALLS"
"""
PYTHON = """#!/bin/bash
echo "python $*" >>"$CALLS"
{ echo "$*"; env; } >>"$CALLS.env"
case "$2" in
slipstream.broker)
    mkdir -p runs/mine
    [[ -n $SLIPSTREAM_TOKEN ]] || echo "%s" >runs/mine/token
    echo tcp://10.0.0.5:20000 >runs/mine/address
    ;;
slipstream.learner)
    echo "rank $NODE_RANK of $MASTER_ADDR:$MASTER_PORT" >>"$CALLS"
    [[ -e failed.$NODE_RANK ]] || { touch "failed.$NODE_RANK"; exit 75; }
    [[ -e endless ]] || exit 0
    ;;
slipstream) exit ;;
esac
trap 'echo "$2 heard SIGTERM" >>"$CALLS"; exit 143' TERM
touch "up.$2"
while :; do sleep 0.05; done
""" % (TOKEN)  # noqa: UP031
SETTINGS = ("learner.num_ranks=2", "cluster.learner.machines=2", "cluster.trusted_network=true", "generators.count=2")


class Job:
    """A batch job in a private folder."""

    def __init__(self, folder: Path, *overrides: str, python: str) -> None:
        self.calls = folder / "calls"
        self._output = folder / "job.out"
        for name, content in {"srun": SRUN, "scontrol": SCONTROL}.items():
            self._add(folder / name, content)
        script = sbatch_script(read_recipe(["name=mine", *overrides], kind="local"), python=python)
        environment = {key: value for key, value in os.environ.items() if key != "SLIPSTREAM_TOKEN"}
        environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(self.calls), "SLURM_JOB_ID": "77"}
        environment |= {"PYTHONPATH": str(ROOT)}
        with self._output.open("w") as output:
            command = ["bash", "-c", script]
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)

    @staticmethod
    def _add(path: Path, content: str) -> None:
        path.write_text(content)
        path.chmod(0o755)

    @property
    def printed(self) -> str:
        return self._output.read_text()

    @classmethod
    def of_fakes(cls, folder: Path) -> "Job":
        cls._add(folder / "python", PYTHON)
        return cls(folder, "cluster.interface=10.0.0.0/8", *SETTINGS, python=str(folder / "python"))


def test_a_job_starts_every_role_restarts_what_fails_and_ends_with_the_learner(tmp_path: Path):
    job = Job.of_fakes(tmp_path)
    assert job.process.wait(timeout=30) == 0, job.printed
    called = job.calls.read_text()
    assert called.index("slipstream prepare") < called.index("-m slipstream.broker") < called.index("srun")
    ranks = re.findall(r"^rank (\d) of (\S+)$", called, re.MULTILINE)
    assert sorted(ranks) == [("0", "10.0.0.5:20577")] * 2 + [("1", "10.0.0.5:20577")] * 2
    assert "learner ended with 75; restarting in 1 s" in job.printed
    started = re.findall(r"^python -m slipstream.generators (.*)$", called, re.MULTILINE)
    own = "name=mine broker.address=tcp://10.0.0.5:20000 --id generator-"
    assert sorted(started) == [f"{own}0", f"{own}1"]
    steps = re.findall(r"^srun (--het-group=\d) ", called, re.MULTILINE)
    assert sorted(steps) == ["--het-group=0", "--het-group=0", "--het-group=1"]
    # The broker says goodbye to the generators, which have already heard of the end.
    assert called.index("slipstream.generators heard SIGTERM") < called.index("slipstream.broker heard SIGTERM")
    assert "scontrol" not in called
    assert TOKEN not in called + job.printed
    assert (tmp_path / "runs/mine/token").stat().st_mode & 0o077 == 0
    told = (tmp_path / "calls.env").read_text()
    assert told.count(f"SLIPSTREAM_TOKEN={TOKEN}") == 6, "four ranks from two starts, and two generators"


def test_before_its_limit_a_job_ends_its_roles_and_is_queued_again(tmp_path: Path):
    (tmp_path / "endless").touch()
    job = Job.of_fakes(tmp_path)
    roles = ("slipstream.broker", "slipstream.learner", "slipstream.generators")
    until(lambda: all((tmp_path / f"up.{role}").exists() for role in roles), timeout_s=30, what="all roles")
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(timeout=30) == 0, job.printed
    called = job.calls.read_text()
    heard = [f"{role} heard SIGTERM" for role in roles]
    assert all(each in called for each in heard), called
    assert called.splitlines()[-1] == "scontrol requeue 77"
    assert called.count("\npython -m slipstream.learner") == 4, "none is restarted"
    runs.assert_none_left(tmp_path)


@pytest.mark.long
def test_a_job_trains_with_ranks_on_two_nodes_and_generators_as_tasks(tmp_path: Path):
    runs.make_task(tmp_path, warm=False)
    network = ("cluster.interface=127.0.0.0/8", "cluster.ports=21200-21299", "weights.transport=delta")
    own = (*network, "learner.max_steps=3")
    job = Job(tmp_path, *SMALL, "learner/engine=deepspeed_zero2", *own, *SETTINGS, python=sys.executable)
    try:
        assert job.process.wait(timeout=270) == 0, job.printed[-6000:]
    finally:
        runs.kill_processes_of(tmp_path)
    assert [row["step"] for row in runs.metrics(tmp_path, "mine")] == [1, 2, 3]
    assert (tmp_path / "runs/mine/token").read_text().strip() not in job.calls.read_text() + job.printed
