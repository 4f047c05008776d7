"""A run as a whole: its name, its settings, and its report."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load, to_yaml
from slipstream.launch import run as run_module
from slipstream.launch.run import describe_finished, suggestions, with_free_name, with_stored_overrides
from slipstream.launch.sweep import Spread, SweptRun, combine, draw, expand, name_runs, run_sweep
from slipstream.observe.terminal import LiveView
from slipstream.runtime.run_folder import RunFolder, find_run
from tests.cases import cases
from tests.fakes import no_file_above
from tests.runs import exit_code

RATE, STEPS = "learner.optimizer.learning_rate", "learner.max_steps"


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


@cases(
    "given, experiment",
    ([], "digits_sft"),
    (["learner.max_steps=3"], "digits_sft"),
    (["sft.train_path=mine.parquet", "model.path=mine"], "sft"),
    (["sft.train_path=mine.parquet", "experiment=digits_sft"], "digits_sft"),
)
def test_sft_on_a_file_of_the_users_own_takes_nothing_from_the_default_task(given: list[str], experiment: str) -> None:
    with pytest.raises(ConfigError, match="mode must be sft, got async"):
        run_module.start_sft([])
    run = load(run_module.with_sft_preset(given))
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


@cases(
    "steps, changed, expected",
    (3, [], "ended after 3 of 3 steps. To continue it, set learner.max_steps above 3."),
    (2, ["learner.max_steps=1"], "ended after 2 of 1 steps. To"),
    (2, [], "because evaluation.stop was met. To continue it, set learner.max_steps above 2 or change evaluation."),
    (3, ["learner.max_steps=9"], ""),
    (2, ["evaluation.stop=null"], ""),
    (3, ["mode=evaluate"], ""),
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


@cases(
    "overrides, runs",
    (["seed=1,2", "learner.max_steps=3"], [["seed=1", "learner.max_steps=3"], ["seed=2", "learner.max_steps=3"]]),
    (["seed=range(1,3)", "name=mine"], [["seed=1"], ["seed=2"]]),
    (["recipe=choice(dapo,gspo)"], [["recipe=dapo"], ["recipe=gspo"]]),
    (["seed=1,2", f"{RATE}=1e-3,3e-3"], [[f"seed={n}", f"{RATE}={r}"] for n in (1, 2) for r in (0.001, 0.003)]),
    (["seed=3", f"{STEPS}=4,5", "seed=1,2", f"{STEPS}=6"], [["seed=1", f"{STEPS}=6"], ["seed=2", f"{STEPS}=6"]]),
    (["data.train=[a,b],[c]"], [["data.train=[a,b]"], ["data.train=[c]"]]),
    (["~loggers", "data.train='a b',c"], [["~loggers", "data.train='a b'"], ["~loggers", "data.train=c"]]),
)
def test_every_combination_is_a_run(overrides: list[str], runs: list[list[str]]) -> None:
    assert [own for _, own in expand(overrides)] == runs


@cases(
    "overrides, sentence",
    (["learner.max_steps=3"], "must have a setting with several values, such as seed=1,2,3"),
    (["name=a,b"], "name must have one value"),
    (["recipe=glob(*)"], "must be listed, got `recipe=glob(*)`"),
    ([f"{RATE}=interval(0,1)"], "must be listed"),
    (["--seed=1,2"], "write seed=1,2."),
)
def test_values_that_cannot_be_swept_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        expand(overrides)


@cases(
    "overrides, names",
    (["seed=1,2"], ["mine-seed-1", "mine-seed-2"]),
    (["seed=1", f"{RATE}=1e-3,3e-3"], ["mine-learning_rate-0.001", "mine-learning_rate-0.003"]),
    (["model.path=/m/a,b/c"], ["mine-path-m_a", "mine-path-b_c"]),
    (["data.train=a b,a_b"], ["mine-1", "mine-2"]),
    (["data.train=[a,b],a" + 80 * "b"], ["mine-1", "mine-2"]),
    (["algorithm.kl.coef=0,1", "algorithm.entropy.coef=2"], ["mine-coef-0", "mine-coef-1"]),
    (["algorithm/filter=a,b", "buffer/filter=c,c"], None),
    (["a.one=1,2", "b.one=3,4"], [f"mine-a.one-{a}-b.one-{b}" for a in (1, 2) for b in (3, 4)]),
)
def test_runs_are_named_after_their_values_if_these_tell_them_apart(overrides, names):
    swept = expand(overrides)
    assert name_runs("mine", swept) == (names or [f"mine-{number}" for number in range(1, len(swept) + 1)])


def test_a_sweep_skips_finished_runs_and_refuses_an_interrupted_one_that_cannot_resume(tmp_path, capfd):
    overrides = ["experiment=digits_serial", "learner.max_steps=3", f"runs_dir={tmp_path}", "name=mine", "resume=auto"]
    for seed in (1, 2):
        folder = RunFolder(load([*overrides, f"name=mine-seed-{seed}", f"seed={seed}"]))
        folder.claim()
        folder.unlock()
        folder.write_summary({"steps": 3, "evaluation": {"eval/accuracy_greedy": seed / 8}})
    run_sweep([*overrides, "seed=1,2"], program="slipstream")
    printed = capfd.readouterr().out
    assert printed.count("is finished: it ended after 3 of 3 steps") == 2
    assert "0.188 (0.125 to 0.250)" in printed
    folder.summary.unlink()
    folder.metrics.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"with mode=serial, .* 'mine-seed-2': delete the folder"):
        run_sweep([*overrides, "seed=1,2"], program="slipstream")


def make_run(seed: int, rate: str, **changes: Any) -> SweptRun:
    results = {"accuracy_greedy": seed / 8, "reward_greedy": 1.0}
    values: dict[str, Any] = {"state": "done", "steps": 80, "results": results} | changes
    return SweptRun(f"mine-{seed}-{rate}", {"seed": str(seed), RATE: rate}, **values)


def test_means_and_ranges_are_over_the_seeds_of_each_combination_that_ended() -> None:
    failed = make_run(4, "1", state="failed", reason="model.path must be a folder.", results={})
    runs = [make_run(1, "1"), make_run(2, "1"), make_run(8, "2"), failed]
    first, second = combine(runs)
    assert (first.values, first.num_runs, second.num_runs) == ({RATE: "1"}, 2, 1)
    assert first.results["accuracy_greedy"] == Spread(mean=0.1875, min=0.125, max=0.25)
    console = Console(width=200, record=True, file=None)
    with console.capture() as printed:
        console.print(*draw(runs))
    rows = [re.split(r" {2,}", line.strip()) for line in printed.get().splitlines()]
    assert rows == [
        ["run", "steps", "accuracy greedy", "reward greedy", "state"],
        ["mine-1-1", "80", "0.125", "1.000", "done"],
        ["mine-2-1", "80", "0.250", "1.000", "done"],
        ["mine-8-2", "80", "1.000", "1.000", "done"],
        ["mine-4-1", "80", "-", "-", "failed"],
        ["mine-4-1: model.path must be a folder."],
        [RATE, "seeds", "accuracy greedy: mean (range)", "reward greedy: mean (range)"],
        ["1", "2", "0.188 (0.125 to 0.250)", "1.000 (1.000 to 1.000)"],
        ["2", "1", "1.000 (1.000 to 1.000)", "1.000 (1.000 to 1.000)"],
    ]
    runs = [SweptRun(f"mine-{rate}", {RATE: rate}) for rate in ("1", "2")]
    assert len([*draw(runs)]) == 1


@pytest.mark.parametrize("content", [b"name: [\n  - {\nseed: 1", b"\xff\xfe\x00", b"", b"nosuch: 1", b"seed: x"])
def test_a_broken_configuration_is_one_sentence(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_bytes(content)
    assert exit_code("status", f"runs_dir={tmp_path}", "mine") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/mine/config.yaml must be a run configuration of this version")
    assert line.endswith("restore it, or use the version that started the run.")


def test_a_run_is_found_by_name_folder_or_setting_or_as_the_newest_and_a_wrong_name_gets_the_nearest(tmp_path, capsys):
    runs_dir = f"runs_dir={tmp_path}"
    for age, name in enumerate(("addition", "digits")):
        folder = RunFolder(load(["experiment=digits_serial", f"name={name}", runs_dir]))
        folder.open()
        os.utime(folder.path / "config.yaml", (1e9 - age, 1e9 - age))
    for words in (["digits", runs_dir], ["name=digits", runs_dir], [str(folder.path)]):
        assert find_run(words, command="plot") == folder.path
    assert exit_code("status", runs_dir) == 2
    assert "run 'addition' must have a store to inspect, but with mode=serial it is private" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        find_run(["digts", runs_dir], command="plot")
    with pytest.raises(ConfigError, match=r"there are '(digits', 'addition|addition', 'digits)'"):
        find_run(["mine", runs_dir], command="plot")


@cases("words", ["status"], ["scale", "generators=2"], ["drain", "generator-0"], ["pause"], ["profile"])
def test_every_command_says_that_a_run_has_ended(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("slipstream.observe.reader.COMMAND_TIMEOUT_S", 0.05)
    folder = RunFolder(load(["name=mine", f"runs_dir={tmp_path}"]))
    folder.open()

    def answer() -> str:
        assert exit_code(*words, f"runs_dir={tmp_path}") == 1
        return capsys.readouterr().err

    assert "run 'mine' is not in progress here" in answer()
    folder.lock()
    assert "no store answered at" in answer()
    folder.write_summary({})
    assert "run 'mine' has ended and its store does not answer: its results are in" in answer()
