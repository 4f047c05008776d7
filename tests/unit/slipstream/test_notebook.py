"""Slipstream from Python: functions that become files, runs that are read, settings that are replayed, the notebook."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import slipstream
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load, to_plain
from slipstream.notebook import Run, Trainer, load_run, path_of, replay_overrides, run
from slipstream.runtime.import_path import find_function
from tests.builders import make_run, write_archive
from tests.cases import cases
from tests.recorded_run import append_rows
from tests.shape.tree import ROOT
from tests.unit.slipstream.observe.catalog.test_catalog import ALL, GROUPS, byte_tokenizer


def test_the_package_loads_nothing_until_a_name_is_used_and_every_name_has_types() -> None:
    code = "import slipstream, sys; print([name for name in sys.modules if name.startswith('slipstream.')])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
    stub = ast.parse((ROOT / "slipstream/__init__.pyi").read_text())
    typed = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(slipstream.__all__)
    assert slipstream.run is run
    assert all(callable(getattr(slipstream, name)) for name in slipstream.__all__)
    assert set(slipstream.__all__) <= set(dir(slipstream))
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'; it has Run, Trainer"):
        slipstream.nosuch  # noqa: B018


def here(solution_str: str) -> float:
    return float(len(solution_str))


def test_functions_get_a_path_that_roles_can_import_or_are_refused(tmp_path, monkeypatch):
    assert path_of("math_answer", folder=tmp_path) == "math_answer"
    assert path_of(here, folder=tmp_path) == f"{__name__}:here"
    monkeypatch.setattr(here, "__module__", "__main__")
    path = path_of(here, folder=tmp_path / "functions")
    assert path == path_of(here, folder=tmp_path / "functions"), "the same source is the same file"
    assert find_function(path, setting="reward")("abc") == 3.0
    with pytest.raises(ConfigError, match="must be defined by `def` at the top level"):
        path_of(lambda text: 1.0, folder=tmp_path)
    monkeypatch.setattr("inspect.getsource", lambda function: (_ for _ in ()).throw(OSError()))
    with pytest.raises(ConfigError, match="put it into a file"):
        path_of(here, folder=tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with an archive, a tokenizer and metrics; its store is gone."""
    byte_tokenizer(tmp_path / "model", *"abcdefghijkl")
    archive = write_archive(tmp_path / "runs/mine/archive", GROUPS)
    config = make_run(name="mine", model={"path": str(tmp_path / "model")}, runs_dir=str(tmp_path / "runs"))
    (archive.parent / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    append_rows(archive.parent, {"step": 1, "version": 1, "bins": {"0": 1}}, {"step": 2, "version": 2, "late": 0.5})
    with (archive.parent / "metrics.jsonl").open("a") as file:
        file.write('\0\0\n{"step": 3')
    return archive.parent


def test_a_run_is_read_as_arrow(folder: Path) -> None:
    found = load_run("mine", runs_dir=folder.parent)
    assert (found.name, found.model, repr(found)) == ("mine", folder / "final_model", f"Run({str(folder)!r})")
    rows = [{"step": step, "version": step, "late": late} for step, late in ((1, None), (2, 0.5))]
    assert found.metrics().to_pylist() == rows
    table = found.trajectories(outcome="retired", sort_by="reward_total", is_descending=True)
    assert table["id"].to_pylist() == ["0-0-1", "1-0-2", "1-0-0", "1-0-1", "0-0-0"]
    assert [stored.trajectory.id for stored in found.stored(text="jkl")] == ALL
    assert "".join(found.group("0")[1].texts) == "abcdefghijkl"
    with pytest.raises(ConfigError, match="must have finished to have a summary"):
        found.summary  # noqa: B018
    with pytest.raises(ConfigError, match="a condition must be one of id, min_reward"):
        found.trajectories(reward=1)
    with pytest.raises(ConfigError, match="nosuch"):
        load_run("nosuch", runs_dir=folder.parent)
    (folder / "metrics.jsonl").unlink()
    assert Run(folder).metrics().num_rows == 0


@cases(
    "overrides",
    ["experiment=digits_serial", "learner.max_steps=7"],
    ["recipe=dapo", "model.path='it\\'s mine'", "seed=3"],
    ["experiment=gsm8k_lora_1gpu", "algorithm/policy_loss=gspo", "learner.optimizer.betas=[0.8,0.9]"],
    ["algorithm/advantage=gae", "algorithm.kl.coef=0.1", "data.curriculum={}", "buffer/filter=accuracy"],
)
def test_a_replay_has_the_settings_of_its_run(overrides: list[str]) -> None:
    config = load(overrides)
    replayed = load([*replay_overrides(config), "replay.path=archive"])
    own, of_replay = to_plain(config), to_plain(replayed)
    for key in ("algorithm", "learner", "evaluation", "data", "model", "seed"):
        assert of_replay[key] == own[key], key
    assert (replayed.mode, replayed.buffer.archive.is_enabled) == ("replay", False)
    assert own["generators"]["sampling"] == of_replay["generators"]["sampling"]


def test_settings_are_checked_before_a_process_starts(tmp_path: Path) -> None:
    trainer = Trainer("experiment=digits_serial", model=tmp_path / "model", reward=here, runs_dir=tmp_path)
    assert trainer.overrides == ["experiment=digits_serial", f"model.path='{tmp_path}/model'"]
    with pytest.raises(ConfigError, match="learner"):
        trainer.train("learner.nosuch=1", name="a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="name must be unused"):
        trainer.train(name="b", seed=1)


def test_a_run_that_fails_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = ("experiment=digits_serial", "prepare=[]", "data.train=nosuch.parquet")
    with pytest.raises(RuntimeError, match=r"run 'a' must succeed, got exit code 2: error: .*nosuch.parquet"):
        run(*own, name="a", runs_dir=tmp_path)
    assert "nosuch.parquet" in capfd.readouterr().out, "what the run says is shown"


@pytest.mark.long
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples/notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    checks = "assert replayed.summary['steps'] == trained.summary['steps'] == 6\nassert best.num_rows == 8 * 8 * 6"
    (tmp_path / "cells.py").write_text("\n\n".join([*cells, checks]))
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "the notebook is stored without outputs"
