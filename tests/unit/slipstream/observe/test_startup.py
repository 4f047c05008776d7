"""The timeline of a run's start and end, from the stages that its roles recorded."""

import json
from pathlib import Path

import pytest

from slipstream.configs.base import ConfigError
from slipstream.observe.startup import explain_start, read_stages
from slipstream.runtime.run_folder import STAGES, RunFolder
from tests.builders import make_run

RECORDED = [
    (100.0, "launcher", 1, "process started"),
    (101.5, "launcher", 1, "roles started"),
    (101.6, "generator-0", 2, "process started"),
    (101.7, "learner", 3, "process started"),
    (109.6, "generator-0", 2, "libraries loaded"),
    (112.0, "generator-0", 2, "weights verified"),
    (112.7, "learner", 3, "training"),
    (142.7, "learner", 3, "trained"),
    (143.2, "learner", 3, "finished"),
    (143.4, "generator-0", 2, "draining"),
    (145.0, "generator-0", 2, "stopped"),
    (145.5, "launcher", 1, "roles ended"),
]


def write(folder: Path, stages: list[tuple[float, str, int, str]], *, damaged: bytes = b"") -> Path:
    lines = [json.dumps(dict(zip(("at", "role", "pid", "stage"), each, strict=True))) for each in stages]
    with (folder / STAGES).open("ab") as file:
        file.write("".join(f"{line}\n" for line in lines).encode() + damaged)
    return folder


def test_the_timeline_of_a_run_is_that_of_its_records(tmp_path: Path) -> None:
    # Roles append their stages in any order.
    answer = explain_start(read_stages(write(tmp_path, RECORDED[::-1])))
    assert answer.headline == (
        "Training began 12.7 s after the start and took 30.0 s; 2.8 s followed: 15.5 s outside of training."
    )
    # The stages that span training, such as `roles ended`, wait for it. That of the learner waits for the generator.
    assert [(each.key, each.figures) for each in answer.findings] == [
        ("learner/training", "11.0 s, until 12.7 s"),
        ("generator-0/libraries loaded", "8.0 s, until 9.6 s"),
        ("generator-0/weights verified", "2.4 s, until 12.0 s"),
    ]
    assert "    9.60      8.00  generator-0   libraries loaded" in answer.facts
    assert "   45.50     44.00  launcher      roles ended" in answer.facts
    assert len(answer.facts) == 1 + len(RECORDED)


def test_a_restarted_process_begins_with_its_own_start(tmp_path: Path) -> None:
    again = [(120.0, "generator-0", 9, "process started"), (128.5, "generator-0", 9, "libraries loaded")]
    facts = explain_start(read_stages(write(tmp_path, RECORDED + again))).facts
    assert "   20.00      0.00  generator-0   process started" in facts
    assert "   28.50      8.50  generator-0   libraries loaded" in facts


def test_only_the_newest_launch_counts(tmp_path: Path) -> None:
    write(tmp_path, RECORDED, damaged=b'{"at": 150.0, "ro')
    resumed = [(200.0, "launcher", 7, "process started"), (201.0, "launcher", 7, "roles started")]
    write(tmp_path, [], damaged=b"\n")
    stages = read_stages(write(tmp_path, resumed))
    assert [each.at for each in stages] == [200.0, 201.0]
    assert explain_start(stages).headline == "1.0 s after the start, the newest stage is: roles started."


def test_roles_started_by_hand_have_a_timeline_and_a_folder_without_stages_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must have stages\.jsonl"):
        explain_start(read_stages(tmp_path))
    write(tmp_path, RECORDED[2:])
    assert [each.at for each in read_stages(tmp_path)][:2] == [101.6, 101.7]


def test_roles_record_stages_only_where_the_folder_of_the_run_is(tmp_path: Path) -> None:
    folder = RunFolder(make_run(runs_dir=str(tmp_path)))
    folder.record_stage("learner", "training")
    assert not folder.path.exists()
    folder.make()
    folder.record_process("learner")
    folder.record_stage("learner", "training")
    began, training = read_stages(folder.path)
    assert (began.stage, training.stage) == ("process started", "training")
    # This process has run for longer than the clock's error.
    assert began.at < training.at
