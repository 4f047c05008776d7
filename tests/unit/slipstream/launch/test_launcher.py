import io
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.broker.status.monitor import Monitor
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.memory.store import MemoryStore
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch import launcher as launcher_module
from slipstream.launch.launcher import Launcher
from slipstream.launch.scaling import LauncherReport, Scaling
from slipstream.runtime.run_folder import RunFolder
from tests.tiny_model import make_tiny_model


def test_a_store_may_lack_the_run_until_a_broker_has_opened_it_and_no_longer(tmp_path: Path) -> None:
    run = load(["experiment=digits_cpu", "name=run", f"runs_dir={tmp_path}"])
    launcher = Launcher(run, RunFolder(run), overrides=[], console=Console(file=io.StringIO()))

    def update(store: MemoryStore) -> None:
        report = LauncherReport(store)
        scaling = Scaling(launcher._pool, report, run=run, check_room=launcher._check_room)
        launcher._update(store, Monitor(store, run), scaling, report)  # type: ignore[arg-type]

    store = MemoryStore()
    update(store)
    store.open_run("run", config_json="{}", num_rows=4, seed=0)
    update(store)
    assert "launcher" in store.roles()
    with pytest.raises(RunConflictError, match=r"must be opened before it is used.* or the store was emptied"):
        update(MemoryStore())


def test_roles_that_share_a_gpu_are_told_the_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr(launcher_module, "visible_gpus", lambda: ["3"])
    monkeypatch.setattr(launcher_module, "gpu_gib", lambda name: {"3": 24.0}[name])

    def arguments(*overrides: str) -> list[str]:
        own = ["name=run", f"runs_dir={tmp_path}", f"model.path={model}", *overrides]
        run = load(own)
        launcher = Launcher(run, RunFolder(run), overrides=own, console=Console(file=io.StringIO()))
        launcher._share_gpu()
        assert launcher._learner._arguments[1:] == launcher._broker._arguments[1:]
        with pytest.raises(ConfigError, match=r"generators must be <= 1 on the one GPU .*, got 2: its memory is dealt"):
            launcher._check_room(2)
        return launcher._broker._arguments

    (told,) = [text for text in arguments() if "kv_cache_gib" in text]
    # What 256 short sequences of such a model fill, and a little more; readable by the roles.
    assert 0.25 <= load([told]).generators.engine.kv_cache_gib < 0.5  # type: ignore[union-attr]
    assert arguments("generators.engine.kv_cache_gib=2")[-1] == "generators.engine.kv_cache_gib=2"
    for other in ("generators/engine=hf", "learner.device=cpu"):
        assert arguments(other)[-1] == other
