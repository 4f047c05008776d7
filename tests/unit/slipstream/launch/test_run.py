"""A run as a whole: its name, its settings, and its report."""

import shlex
from pathlib import Path

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load, to_yaml
from slipstream.launch import run as run_module
from slipstream.launch.run import (
    describe_finished,
    start_sft,
    suggestions,
    with_free_name,
    with_sft_preset,
    with_stored_overrides,
)
from slipstream.observe.terminal import LiveView
from slipstream.runtime.run_folder import RunFolder
from tests.fakes import no_file_above


def test_a_default_name_in_use_gets_the_next_number(tmp_path: Path) -> None:
    overrides = [f"runs_dir={tmp_path}"]
    for name in ("digits_cpu", "digits_cpu-2"):
        run, arguments = with_free_name(load(overrides), overrides)
        assert (run.name, arguments[-1]) == (name, f"name={name}")
        (tmp_path / name).mkdir()
    refused = RunFolder(load([*overrides, "name=digits_cpu-3"]))
    refused.claim()
    assert with_free_name(load(overrides), overrides)[0].name == "digits_cpu-4", "it is in progress"
    refused.unlock()
    assert with_free_name(load(overrides), overrides)[0].name == "digits_cpu-3"
    for chosen in ("name=digits_cpu", "resume=true", "resume=auto"):
        kept = [*overrides, chosen]
        run, arguments = with_free_name(load(kept), kept)
        assert (run.name, arguments) == ("digits_cpu", kept), chosen


@pytest.mark.parametrize(
    ("given", "experiment"),
    [
        ([], "digits_sft"),
        (["learner.max_steps=3"], "digits_sft"),
        (["sft.train_path=mine.parquet", "model.path=mine"], "sft"),
        (["sft.train_path=mine.parquet", "experiment=digits_sft"], "digits_sft"),
    ],
)
def test_sft_on_a_file_of_the_users_own_takes_nothing_from_the_default_task(given: list[str], experiment: str) -> None:
    with pytest.raises(ConfigError, match="mode must be sft, got async"):
        start_sft([])
    run = load(with_sft_preset(given))
    assert (run.mode, run.name) == ("sft", experiment)
    if experiment == "sft":
        assert (run.prepare, run.sft.eval_path, run.sft.batch_size) == ([], "", 64)


def test_a_resumed_run_starts_from_the_overrides_that_started_it(tmp_path: Path) -> None:
    started = [f"runs_dir={tmp_path}", "name=mine", "experiment=addition_cpu", "learner.max_steps=3"]
    folder = RunFolder(load(started))
    folder.claim()
    folder.write_origins({}, overrides=started)
    given = [f"runs_dir={tmp_path}", "name=mine", "resume=true", "learner.max_steps=9"]
    resumed = load(with_stored_overrides(given))
    assert (resumed.data, resumed.learner.max_steps, resumed.resume) == (load(started).data, 9, True)
    for unchanged in (given[:2], [*given, "experiment=digits_cpu"], [given[0], "name=other", "resume=auto"]):
        assert with_stored_overrides(unchanged) == unchanged
    folder.unlock()


@pytest.mark.parametrize(
    ("steps", "changed", "expected"),
    [
        (3, [], "ended after 3 of 3 steps. To continue it, set learner.max_steps above 3."),
        (2, ["learner.max_steps=1"], "ended after 2 of 1 steps. To"),
        (2, [], "because evaluation.stop was met. To continue it, set learner.max_steps above 2 or change evaluation."),
        (3, ["learner.max_steps=9"], ""),
        (2, ["evaluation.stop=null"], ""),
        (3, ["mode=evaluate"], ""),
    ],
)
def test_a_finished_run_is_described(tmp_path: Path, steps: int, changed: list[str], expected: str) -> None:
    started = [f"runs_dir={tmp_path}", "name=mine", "learner.max_steps=3"]
    run = load(started)
    folder = RunFolder(run)
    folder.make()
    assert describe_finished(run, folder) == ""
    (folder.path / "config.yaml").write_text(to_yaml(run))
    folder.write_summary({"steps": steps})
    described = describe_finished(load([*started, *changed]), folder)
    assert expected in described if expected else described == ""


def test_the_commands_suggested_keep_the_settings_of_the_run(tmp_path: Path) -> None:
    overrides = ["experiment=addition_cpu", "generators.reward.function=my:reward", "name=mine"]
    run = load(overrides)
    commands = list(suggestions(run, RunFolder(run), overrides=overrides, program="slipstream"))
    settings = "experiment=addition_cpu generators.reward.function=my:reward"
    with_settings = [line for line in commands if settings in line]
    assert [line.split()[1] for line in with_settings] == ["run", "run", "plan"]
    assert "name=mine-sync" in commands[0]
    assert "slipstream evaluate runs/mine" in commands, "it takes the settings of the run"
    overrides += ["learner.max_steps=7", "buffer/filter=zero_advantage"]
    run = load([*overrides, f"runs_dir={tmp_path}"])
    folder = RunFolder(run)
    folder.make()
    (folder.path / "config.yaml").write_text(to_yaml(run))
    commands = list(suggestions(run, folder, overrides=overrides, program="slipstream"))
    again = load(shlex.split(commands[0])[2:])
    assert (again.learner.max_steps, again.name, again.staleness.max_lag) == (7, "mine-sync", 0)
    assert not [line for line in commands if "max_steps" in line], "a file says the same in fewer characters"
    run = load([*overrides, "cluster.kind=ray", "cluster.interface=10.0.0.0/8"])
    commands = list(suggestions(run, folder, overrides=overrides, program="slipstream"))
    assert "max_steps" in commands[0], "other machines do not have the file"
    serial = ["experiment=digits_serial"]
    commands = list(suggestions(load(serial), RunFolder(run), overrides=serial, program="slipstream"))
    assert not [line for line in commands if "generators.count" in line]


def test_a_run_that_has_ended_is_reported_although_its_curve_cannot_be_drawn(tmp_path, capsys):
    run = load(["experiment=digits_serial", "name=mine", f"runs_dir={tmp_path}"])
    folder = RunFolder(run)
    folder.make()
    folder.write_summary({"times": {}, "best": None, "evaluation": {}, "steps": 1})
    folder.append_metrics({"step": 1, "time_s": 1.0})
    with no_file_above(1000):
        overrides = ["logging.backends=[trackio]", "data.train=[/a.parquet]"]
        run_module.report(run, folder, overrides=overrides, program="slipstream")
    printed = capsys.readouterr().out
    assert "curve        not drawn: [Errno 27] File too large" in printed
    assert "final model" in printed
    assert "plan 'logging.backends=[trackio]' 'data.train=[/a.parquet]'" in printed, "brackets are no markup"
    said = "generator-0 died: [rank0] no file [/usr/lib/x]"
    LiveView(run, console=run_module.console).print_line(said)
    assert capsys.readouterr().out == f"{said}\n"


def test_a_serial_run_leaves_no_folder_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["experiment=digits_serial", "name=mine", f"runs_dir={tmp_path / ('long' * 30)}"]
    for name in ("make_inputs", "_run_here", "report"):
        monkeypatch.setattr(f"slipstream.launch.run.{name}", lambda *_arguments, **_options: None)
    run_module.run_experiment(overrides, program="slipstream")
    folder = RunFolder(load(overrides))
    assert folder.has_run
    assert folder.sockets.parent == Path("/tmp")
    assert not folder.sockets.exists()
