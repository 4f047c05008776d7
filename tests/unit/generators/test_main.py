import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import STORE_PASSWORD_VARIABLE
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.generators.__main__ import accept_settings, find_local_run, ignored_settings, split_id, wait_for_token
from slipstream.runtime.clock import Deadline, WaitTimeoutError
from slipstream.runtime.credentials import TOKEN_VARIABLE, make_token
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run
from tests.cases import cases

ADDRESS = "broker.address=tcp://127.0.0.1:5757"


def test_the_id_may_stand_anywhere_and_is_a_printable_name_on_one_line() -> None:
    for words in (["--id", "second", ADDRESS], [ADDRESS, "--id", "second"], ["--id=second", ADDRESS]):
        assert split_id(words) == ("second", [ADDRESS])
    name, overrides = split_id([ADDRESS])
    assert name.startswith("generator-")
    assert overrides == [ADDRESS]
    for wrong in ([], [ADDRESS], ["a b"], ["a\n"], ["\x1b[2J"], [".x"]):
        with pytest.raises(ConfigError, match="--id"):
            split_id(["--id", *wrong])
    with pytest.raises(ConfigError, match="--id"):
        split_id(["--id="])


REWARD, PATH = "os:system", "hub/model"


def received(**changes: Any) -> RunConfig:
    return make_run(**{"model": {"path": PATH}} | changes)


def accepted(run: RunConfig, own: list[RunConfig], overrides: list[str]) -> RunConfig:
    return accept_settings(msgspec.json.encode(run).decode(), own, overrides)


def test_settings_of_the_run_have_no_effect_here_and_those_of_another_version_are_named_as_such() -> None:
    assert ignored_settings([ADDRESS, "weights.transport=delta", "seed=3"]) == ["seed=3"]
    with pytest.raises(ConfigError, match=r"must run the same version of Slipstream: .* unknown field `novelty`"):
        accept_settings('{"novelty": 1}', [make_run()], [])


def test_a_reward_function_of_the_brokers_alone_is_refused_with_the_setting_that_allows_it() -> None:
    run = received(generators={"reward": {"function": REWARD}})
    complaint = f"got '{REWARD}' only from the broker: .*generators.reward.function={REWARD}"
    with pytest.raises(ConfigError, match=complaint):
        accepted(run, [make_run()], [])
    given = make_run(generators={"reward": {"function": REWARD}})
    assert accepted(run, [make_run(), given], []) == run
    # Nor are other functions of our own package rewards.
    package = "slipstream.generators.rewards"
    for function in (f"{package}.pool:os", f"{package}:functions", "code", "judge"):
        with pytest.raises(ConfigError, match="only from the broker"):
            accepted(received(generators={"reward": {"function": function}}), [make_run()], [])


@cases(
    "agent, code",
    ({"kind": "custom", "function": "os:system"}, "os:system"),
    ({"kind": "tools", "tools": ["calculator", "os:system"]}, "os:system"),
    ({"kind": "tools", "tools": [{"function": "os:system"}]}, "os:system"),
    ({"kind": "tools", "tools": ["python"]}, "python"),
    ({"kind": "interaction", "interactions": [{"function": "my:User", "name": "a"}]}, "my:User"),
    ({"kind": "tools", "tools": [{"function": "mcp", "arguments": {"url": "a"}}]}, 'mcp {"url":"a"}'),
    ({"kind": "tools", "tools": [{"function": "http", "arguments": {"url": "a"}}]}, 'http {"url":"a"}'),
    ({"kind": "search", "index": "http://evil"}, 'search {"index":"http://evil"}'),
)
@pytest.mark.parametrize("is_named", [False, True])
def test_code_of_agents_and_tools_never_comes_from_the_broker_alone(agent: dict, code: str, is_named: bool) -> None:
    generators = {"agents": {"mine": agent}} if is_named else {"agent": agent}
    run = received(generators=generators)
    with pytest.raises(ConfigError, match=f"got '{code}' only from the broker: .*generators.agents"):
        accepted(run, [make_run()], [])
    assert accepted(run, [make_run(generators=generators)], []) == run
    calculating = received(generators={"agent": {"kind": "tools", "tools": ["calculator"]}})
    assert accepted(calculating, [make_run()], []) == calculating


def test_addresses_in_the_arguments_of_a_tool_never_come_from_the_broker_alone_but_the_model_may_lie_elsewhere() -> (
    None
):
    def tool(address: str) -> dict[str, Any]:
        return {"agent": {"kind": "tools", "tools": [{"function": "python", "arguments": {"address": address}}]}}

    with pytest.raises(ConfigError, match=r"got 'python {.address.:.http://evil.}' only from the broker"):
        accepted(received(generators=tool("http://evil")), [make_run(generators=tool("http://sandbox"))], [])
    assert accepted(received(), [make_run()], ["model.path=/mnt/model"]).model.path == "/mnt/model"
    assert accepted(received(), [make_run()], []) == received()


@pytest.mark.parametrize("own", [{}, {"path": PATH}, {"path": "another", "trust_remote_code": True}])
def test_code_in_a_checkpoint_is_trusted_here_or_not_at_all(own: dict[str, Any]) -> None:
    run = received(model={"path": PATH, "trust_remote_code": True})
    with pytest.raises(ConfigError, match=r"model\.path=hub/model model\.trust_remote_code=true"):
        accepted(run, [make_run(**{"model": own} if own else {})], [])
    trusting = make_run(model={"path": PATH, "trust_remote_code": True})
    assert accepted(run, [trusting], []) == run


def recorded(folder: Path, name: str, address: str | None = None) -> RunConfig:
    run = make_run(name=name, runs_dir=str(folder), broker={"address": address})
    RunFolder(run).open()
    return run


@contextmanager
def listener(run: RunConfig) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as broker:
        broker.bind(RunFolder(run).broker_address.removeprefix("ipc://"))
        broker.listen()
        yield


def test_a_generator_joins_the_run_of_its_name_else_of_its_address_else_the_newest_that_listens(tmp_path: Path) -> None:
    first, second = recorded(tmp_path, "first", "ipc:///a"), recorded(tmp_path, "second")
    third = recorded(tmp_path, "third")
    for at, run in enumerate((first, second, third), start=1):
        os.utime(tmp_path / run.name / "config.yaml", (at, at))

    def found(*overrides: str) -> RunConfig | None:
        words = [*overrides, f"runs_dir={tmp_path}"]
        return find_local_run(load(words), words)

    assert found() is None
    with listener(second):
        assert found() == second
        with listener(third):
            assert found() == third
    assert found("name=first") == first
    assert found("broker.address=ipc:///a") == first
    assert found("broker.address=tcp://127.0.0.1:1") is None
    assert found("name=first", "broker.address=tcp://127.0.0.1:1") == first
    assert found(f"broker.address={RunFolder(second).broker_address}") == second
    assert found("name=fourth") is None


def test_without_a_token_it_waits_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    words = [f"runs_dir={tmp_path}"]
    missing = r"missing: a run whose broker listens in .* \(start a broker .*, or broker.address and a token; set SLIP"
    with pytest.raises(WaitTimeoutError, match=missing):
        wait_for_token(load(words), words, deadline=Deadline(0.1, what="a run"))
    # Another run, of the name that is the default, has a token, too.
    make_token(default := load(words))
    run = recorded(tmp_path, "mine")
    token = make_token(run)
    with listener(run):
        own, found = wait_for_token(default, words, deadline=Deadline(5, what="a run"))
    assert (own[0], found) == (run, token)
    with pytest.raises(WaitTimeoutError, match=r"missing: run 'fifth' in .* \(there are 'mine'; start a"):
        wait_for_token(load([*words, "name=fifth"]), [*words, "name=fifth"], deadline=Deadline(0.1, what="a run"))


def test_with_token_and_name_the_folder_need_not_exist_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a token of one's own")
    monkeypatch.setenv(STORE_PASSWORD_VARIABLE, "that of the launcher's store")
    words = [f"runs_dir={tmp_path}", "name=mine"]
    (own,), token = wait_for_token(given := load(words), words, deadline=Deadline(0.1, what="a run"))
    assert (own, token) == (given, "a token of one's own")
    assert RunFolder(own).broker_address == f"ipc://{RunFolder(given).sockets}/broker.sock"
    # The code of others that a generator starts must not inherit it.
    assert not {TOKEN_VARIABLE, STORE_PASSWORD_VARIABLE} & os.environ.keys()
    monkeypatch.setenv(TOKEN_VARIABLE, "a token of one's own")
    with pytest.raises(WaitTimeoutError, match="missing: a run whose broker listens"):
        wait_for_token(load(words[:1]), words[:1], deadline=Deadline(0.1, what="a run"))
