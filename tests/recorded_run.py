"""Run folders as a run leaves them, made by hand: settings, metrics, summary, and a store where one is asked for."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slipstream.buffer.records import CheckpointPointer, Claim, VersionEntry, make_entry
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.store import Store
from slipstream.configs.run import RunConfig
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_packed, make_run

S = TypeVar("S", bound=Store)


SHARES = {"waiting": 0.2, "compute": 0.7, "rest": 0.1}
LEARNER = {"role": "learner", "count": 1, "shares": SHARES, "cpu_s": 0.3}


def make_row(step: int, **values: Any) -> dict[str, Any]:
    """The metrics of a step of a run that learns; an evaluation in every tenth."""
    learned = 1 - math.exp(-step / 25)
    row: dict[str, Any] = {
        "step": step,
        "version": step,
        "time_s": 0.5 * step,
        "learner/reward_mean": 0.2 + 0.7 * learned + 0.03 * math.sin(step),
        "learner/entropy": 2.2 - 1.6 * learned,
        "learner/grad_norm": 1.5 + 0.3 * math.cos(step),
        "learner/loss": -0.05 + 0.02 * math.sin(2 * step),
        "learner/ess": 0.97,
        "learner/by_lag/0/mismatch_k3": 1e-9,
        "learner/by_lag/1/mismatch_k3": 2e-4,
        "lag/mean": 1.4,
        "lag/max": 3,
        "lag/histogram": {"0": 210, "1": 420, "3": 90},
        "generators/tokens_per_s": 5200.0 + 90 * math.sin(step),
        "learner/tokens_per_s": 4900.0,
        "learner/wait_s": 0.1,
        "learner/train_s": 0.35,
        "learner/publish_s": 0.05,
        "times": {"steps": step, "step_s": 0.5, "roles": [LEARNER]},
    }
    return row | ({"eval/accuracy_sampled": 0.9 * learned} if step % 10 == 0 else {}) | values


def append_rows(folder: Path, *rows: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def record_run(
    runs_dir: Path, name: str = "mine", *, steps: int = 30, origins: dict[str, str] | None = None, **settings: Any
) -> Path:
    """Write the folder of a run that is over; return it. `settings` as for `make_run`."""
    run = make_config(runs_dir, name, **settings)
    folder = RunFolder(run)
    folder.make()
    (folder.path / "config.yaml").write_bytes(msgspec.yaml.encode(run))
    folder.write_origins(origins or {"learner.max_steps": "command line learner.max_steps=40"}, overrides=[])
    append_rows(folder.path, *map(make_row, range(1, steps + 1)))
    if steps:
        final = {"evaluation": {"eval/accuracy_sampled": 0.71}, "num_final_prompts": {"sampled": 512}}
        folder.write_summary({"accuracy_sampled": 0.71, "steps": steps, "mode": "async", **final})
    return folder.path


def make_config(runs_dir: Path, name: str = "mine", **settings: Any) -> RunConfig:
    return make_run(**({"name": name, "runs_dir": str(runs_dir), "learner": {"max_steps": 40}} | settings))


def record_step(store: S, *, run: str = "mine", is_retired: bool = False) -> S:
    """Record a run with one group of two that step 1 trained on, and versions 0 and 1; return the store."""
    store.open_run(run, config_json="{}", num_rows=5, seed=7)
    store.record_version(VersionEntry(0, 0, "aaaa"))
    store.lease(owner="generator-0", max_groups=1, group_size=2, lease_s=60, admission_limit=9)
    store.insert([make_packed("0", index, group_size=2) for index in (0, 1)])
    claim = store.claim(step=1, num_groups=1, version=0, rules=SamplingRules(), lease_s=60)
    assert isinstance(claim, Claim)
    store.commit(claim, make_entry(claim, store.fetch(claim.group_ids), version=0, seed=7, config_hash="cfg"))
    store.record_version(VersionEntry(1, 1, "bbbb"))
    if is_retired:
        store.checkpoint(CheckpointPointer(1, 1, "step-00000001"), fence=claim.fence)
    return store
