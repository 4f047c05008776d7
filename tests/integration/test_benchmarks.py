"""Every benchmark runs to completion at its smallest size and writes its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

TINY = ["prepare=[]", "model.path=models/digits-random"]
RUN = [
    *TINY,
    "generators/engine=scripted",
    "learner/engine=torch",
    "learner.groups_per_step=2",
    "learner.checkpoint.every_steps=50",
    "evaluation.monitor_prompts=2",
    "evaluation.final_prompts=4",
]
REAL = pytest.mark.long
"""Mark benchmarks that start vLLM, DeepSpeed, or a whole run, or take 15 s."""
BENCHMARKS = [
    pytest.param(
        "first_minute", ["--seeds=0", "--here", "--", *RUN, "learner.max_steps=11", "learner.stop=null"], marks=REAL
    ),
    ("ingest", ["--rounds=1", "--mib=1", "--tokens=64", "--durability=fast"]),
    ("ingest", ["--sockets", "--rounds=1", "--mib=1", "--tokens=64"]),
    (
        "peers_at_scale",
        ["--peers=6", "--brokers=2", "--tokens=64", "--tokens-per-s=4000", "--seconds=2", "--processes=2"],
    ),
    ("weights.delta", ["--steps=4", "--layers=1", "--width=64"]),
    ("weights.relay", ["--generators=5", "--mib=1", "--bucket-mib=1", "--fan-out=2", "--uplink-mib-s=0", "--rounds=1"]),
    pytest.param("weights.kills", ["--kills=1", "--generators=2", "--mib=1", *TINY], marks=REAL),
    pytest.param(
        "generators.slow_generator", ["--settings=1", "--rounds=1", "--seconds=2", "--times=2", *TINY], marks=REAL
    ),
    pytest.param(
        "generators.long_answers",
        ["--pacing-lags=4", "--seconds=1.5", "--step-s=0.1", "--token-s=0.0005", "--sigma=0.5"],
        marks=REAL,
    ),
    pytest.param("learner.long_context", ["--rounds=1", "--tokens=64", "--ranks=2", "--width=32"], marks=REAL),
    pytest.param("learner.packing", ["--rounds=1", "--groups=1"], marks=REAL),
    pytest.param("viewer", ["--rows=2000", "--rounds=1"], marks=REAL),
    pytest.param(
        "generators.elastic",
        ["--phases", "1:0", "2:2", "--", *RUN, "learner.max_steps=4", "learner.stop=null"],
        marks=REAL,
    ),
    pytest.param("gpu", ["--device=cpu", "--tiny", "--seconds=1"], marks=REAL),
    pytest.param("overhead", ["--parts=learner", "--seconds=0.1", "--rounds=1", "--", *TINY], marks=REAL),
    pytest.param("overhead", ["--parts=generators", "--seconds=0.1", "--rounds=1", "--", *TINY], marks=REAL),
    pytest.param(
        "weights.update_pause",
        ["--updates=1", "--requests=2", "--layers=1", "--width=64", "--kv-on-update=keep"],
        marks=REAL,
    ),
    pytest.param(
        "generators.prefix_caching",
        ["--rounds=1", "--conversations=2", "--turns=2", "--prompt=8", "--tokens=4", "--layers=1", "--width=32"],
        marks=REAL,
    ),
    pytest.param(
        "learner.router_replay",
        ["--dtypes=float32", "--lags=0", "--answers=2", "--tokens=4", "--layers=1", "--experts=4"],
        marks=REAL,
    ),
    pytest.param("weights.planted_faults", ["--faults=1"], marks=REAL),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("benchmarks"), warm=False)


@pytest.mark.parametrize(("name", "arguments"), BENCHMARKS)
def test_a_benchmark_writes_its_figures(folder: Path, tmp_path: Path, name: str, arguments: list[str]):
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", f"--out={out}", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert json.loads(out.read_text()).keys() > {"machine", "settings"}
