"""Every benchmark runs to completion at its smallest size and writes its figures."""

import json
import sys
from pathlib import Path

import pytest

from tests import runs

TINY = "experiment=digits_cpu prepare=[] model.path=models/digits-random"
RUN = (
    f"{TINY} generators/engine=scripted learner/engine=torch learner.prompts_per_step=2 evaluation.stop=null "
    "learner.checkpoint.every_steps=50 evaluation.num_prompts=2 evaluation.num_final_prompts=4"
)
QUICK = {"long_run": "--steps=120 --trajectories=8"}
"""One of them in CI: mypy checks what the others call."""
LONG = {
    "weights.delta": "--steps=4 --layers=1 --width=64",
    "ingest": "--rounds=1 --mib=1 --tokens=64 --durability=fast",
    "ingest --sockets": "--rounds=1 --mib=1 --tokens=64",
    "peers_at_scale": "--peers=6 --brokers=2 --tokens=64 --tokens-per-s=4000 --seconds=2 --processes=2",
    "weights.relay": "--generators=5 --mib=1 --bucket-mib=1 --fan-out=2 --uplink-mib-s=0 --rounds=1",
    "outcome_rewards": "--seeds=0 --methods=prime --steps=1 --groups=1 --jobs=1",
    "first_minute": f"--seeds=0 --here -- {RUN} learner.max_steps=11",
    "weights.kills": f"--kills=1 --generators=2 --mib=1 {TINY}",
    "generators.slow_generator": f"--settings=1 --rounds=1 --seconds=2 --times=2 {TINY}",
    "generators.long_answers": "--target-lags=4 --seconds=1.5 --step-s=0.1 --token-s=0.0005 --sigma=0.5",
    "learner.long_context": "--rounds=1 --tokens=64 --ranks=2 --width=32",
    "learner.packing": "--rounds=1 --groups=1",
    "viewer": "--rows=2000 --rounds=1",
    "generators.elastic": f"--phases 1:0 2:2 -- {RUN} learner.max_steps=4",
    "gpu": "--device=cpu --tiny --seconds=1",
    "overhead --parts=learner": f"--seconds=0.1 --rounds=1 -- {TINY}",
    "overhead --parts=generators": f"--seconds=0.1 --rounds=1 -- {TINY}",
    "weights.update_pause": "--updates=1 --requests=2 --models default",
    "generators.prefix_caching": ("--rounds=1 --conversations=2 --turns=2 --prompt=8 --tokens=4 --layers=1 --width=32"),
    "learner.router_replay": "--dtypes=float32 --lags=0 --answers=2 --tokens=4 --layers=1 --experts=4",
    "weights.planted_faults": "--faults=1",
}


@pytest.mark.parametrize("command", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_a_benchmark_writes_its_figures(folder: Path, tmp_path: Path, command: str):
    out, (name, *options) = tmp_path / "figures.json", command.split()
    arguments = [f"--out={out}", *options, *(QUICK | LONG)[command].split()]
    done = runs.call([sys.executable, "-m", f"benchmarks.{name}", *arguments], folder, PYTHONPATH=str(runs.ROOT))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert json.loads(out.read_text()).keys() > {"machine", "settings"}
