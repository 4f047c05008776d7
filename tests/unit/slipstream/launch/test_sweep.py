"""Sweeps: their runs, the names of these, and the tables at the end."""

import re
from typing import Any

import pytest
from rich.console import Console

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch.sweep import Spread, SweptRun, combine, draw, expand, name_runs, run_sweep
from slipstream.runtime.run_folder import RunFolder

RATE, STEPS = "learner.optimizer.learning_rate", "learner.max_steps"


@pytest.mark.parametrize(
    ("overrides", "runs"),
    [
        (["seed=1,2", "learner.max_steps=3"], [["seed=1", "learner.max_steps=3"], ["seed=2", "learner.max_steps=3"]]),
        (["seed=range(1,3)", "name=mine"], [["seed=1"], ["seed=2"]]),
        (["recipe=choice(dapo,gspo)"], [["recipe=dapo"], ["recipe=gspo"]]),
        (["seed=1,2", f"{RATE}=1e-3,3e-3"], [[f"seed={n}", f"{RATE}={r}"] for n in (1, 2) for r in (0.001, 0.003)]),
        (["seed=3", f"{STEPS}=4,5", "seed=1,2", f"{STEPS}=6"], [["seed=1", f"{STEPS}=6"], ["seed=2", f"{STEPS}=6"]]),
        (["data.train=[a,b],[c]"], [["data.train=[a,b]"], ["data.train=[c]"]]),
        (["~loggers", "data.train='a b',c"], [["~loggers", "data.train='a b'"], ["~loggers", "data.train=c"]]),
    ],
)
def test_every_combination_is_a_run(overrides: list[str], runs: list[list[str]]) -> None:
    assert [own for _, own in expand(overrides)] == runs


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["learner.max_steps=3"], "must have a setting with several values, such as seed=1,2,3"),
        (["name=a,b"], "name must have one value"),
        (["recipe=glob(*)"], "must be listed, got `recipe=glob(*)`"),
        ([f"{RATE}=interval(0,1)"], "must be listed"),
        (["--seed=1,2"], "write seed=1,2."),
    ],
)
def test_values_that_cannot_be_swept_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        expand(overrides)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["seed=1,2"], ["mine-seed-1", "mine-seed-2"]),
        (["seed=1", f"{RATE}=1e-3,3e-3"], ["mine-learning_rate-0.001", "mine-learning_rate-0.003"]),
        (["model.path=/m/a,b/c"], ["mine-path-m_a", "mine-path-b_c"]),
        (["data.train=a b,a_b"], ["mine-1", "mine-2"]),
        (["data.train=[a,b],a" + 80 * "b"], ["mine-1", "mine-2"]),
        (["algorithm.kl.coef=0,1", "algorithm.entropy.coef=2"], ["mine-coef-0", "mine-coef-1"]),
        (["algorithm/filter=a,b", "buffer/filter=c,c"], None),
        (["a.one=1,2", "b.one=3,4"], [f"mine-a.one-{a}-b.one-{b}" for a in (1, 2) for b in (3, 4)]),
    ],
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
