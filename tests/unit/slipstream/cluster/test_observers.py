import importlib.util
import json
import socket
from pathlib import Path

import msgspec
import pytest

from slipstream.cluster import observers
from slipstream.cluster.observers import Observers, check_observers, role_of
from slipstream.configs.base import ConfigError
from tests.builders import make_run

OWN = """
class Mine:
    def __init__(self, run, *, color="red"):
        self.log = print

    log = print


class Mute:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
def test_a_missing_package_is_one_sentence_with_the_command(name, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(observers, "find_spec", lambda each: None if each == name else find(each))
    with pytest.raises(ConfigError) as refusal:
        check_observers(make_run(logging={"backends": [name]}))
    assert f"`pip install {name}`" in str(refusal.value)
    assert str(refusal.value).count(". ") == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"logging": {"backends": ["mlflow"]}},
            "loggers must name trackio, wandb, tensorboard or a class as module:Class",
        ),
        ({"logging": {"backends": ["nowhere:Mine"]}}, "loggers must name a module that can be imported"),
        ({"logging": {"backends": ["OWN:Nine"]}}, "Did you mean 'Mine'"),
        ({"logging": {"backends": ["OWN:Mute"]}}, "with a method log"),
        ({"loggers": ["OWN:Mine"], "logging": {"options": {"OWN:Mine": {"size": 1}}}}, "logging.options must fit"),
    ],
)
def test_a_logger_that_cannot_work_is_refused_before_anything_starts(settings, sentence, own):
    filled = make_run(**json.loads(json.dumps(settings).replace("OWN", str(own))))
    with pytest.raises(ConfigError, match="log") as refusal:
        check_observers(filled)
    assert sentence in str(refusal.value)


def test_a_logger_of_ones_own_is_accepted_and_its_role_is_the_name_of_a_file(own):
    check_observers(make_run(loggers=[f"{own}:Mine"], logging={"options": {f"{own}:Mine": {"color": "blue"}}}))
    assert role_of("my/own.py:Mine") == "logger-my-own.py-Mine"


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(msgspec.ValidationError, match="name each once"):
        make_run(logging={"backends": ["wandb", "wandb"]})
    with pytest.raises(msgspec.ValidationError, match="name loggers of the run"):
        make_run(loggers=["wandb"], logging={"options": {"trackio": {}}})


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.prometheus_port must be free .* got {port}"):
            check_observers(make_run(metrics={"prometheus_port": port}))


def test_an_observer_that_keeps_dying_is_given_up_and_ends_nothing(tmp_path):
    run = make_run(name="nowhere", runs_dir=str(tmp_path), loggers=["tensorboard"])
    found = Observers(run, logs=tmp_path)
    found.start()
    (process,) = found._processes
    # It finds no run folder, which is its own verdict.
    while process.is_running:
        pass
    (sentence,) = found.poll()
    assert "the run continues without logger-tensorboard" in sentence
    assert found.poll() == []
    assert found.stop() == []
