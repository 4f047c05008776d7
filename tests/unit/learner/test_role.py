from pathlib import Path

import pytest
import torch

from slipstream.configs.load import load
from slipstream.learner.build import choose_device
from slipstream.learner.errors import TrainEngineError
from slipstream.learner.role import wait_for_token
from slipstream.runtime.clock import Deadline, WaitTimeoutError
from slipstream.runtime.credentials import TOKEN_VARIABLE, make_token
from slipstream.runtime.run_folder import RunFolder


@pytest.mark.parametrize("token", ["", "a token of one's own"])
def test_a_learner_with_a_mistyped_name_suggests_existing_runs_and_creates_none(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    run, mistyped = (load([f"name={name}", f"runs_dir={tmp_path}"]) for name in ("mine", "mien"))
    expected = make_token(run)
    RunFolder(run).open()
    assert wait_for_token(run, deadline=Deadline(0, what="a run")) == expected
    with pytest.raises(WaitTimeoutError, match=r"missing: run 'mien' in .*: did you mean 'mine'\?; correct name="):
        wait_for_token(mistyped, deadline=Deadline(0.3, what="a run"))
    assert [folder.name for folder in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(("setting", "num_gpus"), [("cuda", 0), ("cuda", 2), ("auto", 2)])
def test_a_rank_without_a_gpu_is_reported(setting: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose_device("cpu", local_rank=2) == torch.device("cpu")
    with pytest.raises(TrainEngineError, match=rf"^learner.device={setting} needs .*, got {num_gpus} .* for 3 or more"):
        choose_device(setting, local_rank=2)
    if num_gpus:
        assert choose_device(setting, local_rank=1) == torch.device("cuda", 1)
