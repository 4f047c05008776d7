import io
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.broker.status.monitor import Monitor
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.memory.store import MemoryStore
from slipstream.configs.load import load
from slipstream.launch.launcher import Launcher
from slipstream.launch.scaling import LauncherReport, Scaling
from slipstream.runtime.run_folder import RunFolder


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
