"""The batch script is what Slurm and bash understand; tests/integration/test_slurm.py runs it."""

import re
import shlex
import shutil
import subprocess

import pytest

from slipstream.cli import main
from slipstream.cluster.recipe import read_recipe
from slipstream.cluster.slurm import sbatch_script
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load

SPREAD = (
    "name=mine",
    "learner.num_ranks=16",
    "learner.device=cuda",
    "cluster.learner={machines: 2, cpus: 32}",
    "cluster.interface=10.0.0.0/8",
    "cluster.trusted_network=true",
    "generators.count=4",
    "cluster.generator={cpus: 7.5, labels: {kind: h100}}",
)


def script(*overrides: str, **more: object) -> str:
    return sbatch_script(read_recipe(list(overrides), kind="local"), python="/opt/a b/python", **more)  # type: ignore[arg-type]


def variable(text: str, name: str) -> list[str]:
    (value,) = re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)
    return shlex.split(value.removeprefix("(").removesuffix(")"))


def test_a_job_asks_for_the_nodes_of_the_learner_and_the_tasks_of_generators_each_with_own_options():
    text = script(*SPREAD, options=["--partition=gpu"])
    for checker in (["bash", "-n"], ["shellcheck", "--shell=bash", "-"]):
        if shutil.which(checker[0]):
            assert subprocess.run(checker, input=text, text=True, check=False).returncode == 0
    options = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    at = options.index("hetjob")
    core, generators = options[:at], options[at + 1 :]
    nodes = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=8"]
    tasks = ["--ntasks=4", "--cpus-per-task=8", "--gpus-per-task=1", "--constraint=h100"]
    assert core[-6:] == [*nodes, "--partition=gpu"]
    assert {"--job-name=mine", "--requeue", "--open-mode=append", "--signal=B:USR1@180"} <= set(core)
    assert generators == [*tasks, "--partition=gpu"]
    assert variable(text, "core") == ["--het-group=0", *nodes]
    assert variable(text, "generators") == ["--het-group=1", *tasks]
    assert variable(text, "python") == ["/opt/a b/python"]
    assert (variable(text, "meet_from"), variable(text, "meet_ports")) == (["20500"], ["500"])
    sizes = ("cluster.learner.memory_gib=512", "cluster.generator.memory_gib=60")
    text = script(*SPREAD, *sizes, core_options=["--partition=h200"], generator_options=["--partition=l40s"])
    options = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    at = options.index("hetjob")
    core, generators = options[:at], options[at + 1 :]
    assert {"--partition=h200", "--mem=524288M"} <= set(core)
    assert {"--partition=l40s", "--mem-per-cpu=7680M"} <= set(generators)
    assert "--mem=524288M" in variable(text, "core")
    assert "--partition=l40s" not in core


def test_the_roles_get_the_settings_of_the_run_and_go_on_where_they_were():
    text = script(*SPREAD, "data.train='it is $HOME \"here\".jsonl'", "model.path=models/mine")
    run = load(variable(text, "settings"))
    assert (run.name, run.resume, run.cluster.kind) == ("mine", "auto", "local")
    assert run.data.train == 'it is $HOME "here".jsonl'
    assert variable(text, "own") == ["model.path=models/mine", "name=mine"]
    assert "resume=true" in variable(script(*SPREAD, "resume=true"), "settings")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], r"^cluster\.interface must name the network that the machines share"),
        ([*SPREAD, "learner.num_ranks=15"], r"^cluster\.learner\.machines must divide learner\.num_ranks \(15\), got"),
        ([*SPREAD, "cluster.trusted_network=false"], r"^cluster\.trusted_network must be true with cluster\.learner"),
    ],
)
def test_a_job_whose_roles_could_not_meet_is_refused(overrides: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        script(*overrides)


def test_without_print_the_script_is_submitted_from_its_input(tmp_path, monkeypatch, capsys):
    call = ["launch", "slurm", *SPREAD]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main(call)
    assert caught.value.code == 2
    assert "error: sbatch must be installed to start the run, but is not: run this where" in capsys.readouterr().err
    main([*call, "--print"])
    printed = capsys.readouterr().out
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "sbatch").write_text("#!/bin/bash\ncat >submitted\necho Submitted batch job 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    main(call)
    assert capsys.readouterr().out == "Submitted batch job 7\n"
    assert (tmp_path / "submitted").read_text() == printed
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho 'no such partition' >&2\nexit 3\n")
    with pytest.raises(SystemExit) as caught:
        main(call)
    assert caught.value.code == 1
    assert "no such partition" in capsys.readouterr().err
