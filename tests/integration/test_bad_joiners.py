"""Invalid peers, with the real commands: one error message and exit code 2 on their side, the reason in the broker's
log and the run's events, and an unharmed run.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from tests import runs
from tests.runs import SMALL, Call, Run, call_each, end, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKEN, OTHER_TOKEN = "the-token-of-this-run", "the-token-of-another-run"
DEADLINE_S = 120.0


class Joiner(NamedTuple):
    """A peer that must be rejected."""

    role: str
    arguments: tuple[str, ...]
    error: str
    """Pattern of its error."""
    event: str = ""
    """Start of the run's event; empty if the peer never reached the broker."""
    token: str = TOKEN
    home: str = "."
    """Working folder below the test's folder, which contains its model."""


ID = ("--id", "stranger")
SAME_MODEL = r"model\.path must hold the same model here as at the broker, got 'models/digits-random' with vocab_size "
NO_TOKEN = r"the token must be that of the broker at ipc:.*, got none: set SLIPSTREAM_TOKEN"
# A role's name as an id and another schema are refused in the same way: tests/unit/broker/test_router_joining.py.
JOINERS = {
    "no token": Joiner("generators", ID, NO_TOKEN, token="", home="wide"),
    "another token": Joiner("generators", (*ID, "broker.token_file=other_token"), "got another one", token=""),
    "a taken id": Joiner(
        "generators", ("--id", "generator-0"), r"peer id 'generator-0' must be unique, but process \d+ on ", "refused: "
    ),
    "another model": Joiner("generators", ID, SAME_MODEL + r"\d+ here and \d+ at", "left: ", home="wide"),
    "a second learner": Joiner("learner", SMALL, r"a run has one learner, but process \d+ on ", "refused: "),
}
OF_LONE_BROKER = {
    "settings of another run": Joiner(
        "learner", SMALL, "settings must match the broker's, got differences in name", "left: "
    ),
    "another model": Joiner("learner", (*SMALL, "name=mine"), SAME_MODEL + "999 here", "left: ", home="wide"),
    "a second broker": Joiner(
        "broker", (*SMALL, "name=mine"), "must have one launcher, or one broker started by hand, but"
    ),
}
Ends = dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = runs.make_task(tmp_path_factory.mktemp("join"), warm=False)
    shutil.copytree(made / "models", made / "wide" / "models")
    config = made / "wide/models/digits-random/config.json"
    changed, count = re.subn(r'"vocab_size": \d+', '"vocab_size": 999', config.read_text())
    assert count
    config.write_text(changed)
    for name, token in (("private", TOKEN), ("other", OTHER_TOKEN)):
        (made / f"{name}_token").write_text(token)
        (made / f"{name}_token").chmod(0o600)
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    """A run in training. Its roles have the token from broker.token_file."""
    address = f"broker.address=ipc://{folder}/guarded.sock"
    # Slow, to leave the processor to the joiners.
    pace = ("learner.max_steps=100000", "generators.engine.seconds_per_token=0.3")
    started = Run(folder, "guarded", address, *pace, "broker.token_file=private_token")
    with started.ended_at_last():
        until(lambda: started.steps >= 2 or started.launcher.poll() is not None, timeout_s=DEADLINE_S, what="training")
        yield started


def end_all(joiners: dict[str, Joiner], folder: Path, *overrides: str) -> Ends:
    calls = {
        name: Call(f"slipstream.{each.role}.__main__", (*each.arguments, *overrides), each.home, each.token)
        for name, each in joiners.items()
    }
    return call_each(calls, folder, imports=["slipstream.learner.role"])


def error_of(done: subprocess.CompletedProcess[str], pattern: str) -> str:
    """Check that a process ended with one error that matches; returns it."""
    assert done.returncode == 2, done.stdout + done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(pattern, error), error
    for unwanted in ("Traceback", TOKEN, OTHER_TOKEN):
        assert unwanted not in done.stdout + done.stderr
    return error.removeprefix("error: ")


def has_event(run: Run, beginning: str) -> bool:
    with closing(open_run_store(EmbeddedRedis(run.path / "store").url, run.name, timeout_s=20)) as store:
        return any(event.text.startswith(beginning) for event in store.events(limit=256))


@pytest.fixture(scope="module")
def ended(folder: Path, run: Run) -> Ends:
    return end_all(JOINERS, folder, "name=guarded", f"broker.address=ipc://{folder}/guarded.sock")


@pytest.mark.parametrize("name", JOINERS)
def test_a_bad_joiner_ends_with_one_error(run: Run, ended: Ends, name: str) -> None:
    joiner = JOINERS[name]
    error = error_of(ended[name], joiner.error)
    if joiner.event:
        until(lambda: has_event(run, joiner.event + error), timeout_s=30, what="an event with the reason")
        assert error in run.log("broker")


@pytest.mark.usefixtures("ended")
def test_the_status_of_the_run_shows_peers_with_another_token(run: Run) -> None:
    is_shown = lambda: "connections without the run's token" in run.call("status", "--json").stdout  # noqa: E731
    until(is_shown, timeout_s=60, what="an event in the status")


@pytest.mark.usefixtures("ended")
def test_a_second_launcher_is_refused_and_the_run_outlives_all_bad_joiners(folder: Path, run: Run) -> None:
    pid_file = run.path / "store/redis.pid"
    pid, steps = pid_file.read_text(), run.steps
    second = runs.call(runs.command(*SMALL, "resume=true", "name=guarded"), folder)
    assert str(run.launcher.pid) in error_of(second, "must have one launcher, .* but process")
    until(lambda: run.steps > steps + 2, timeout_s=DEADLINE_S, what="further steps")
    assert "restarted" not in run.printed
    assert pid_file.read_text() == pid
    assert psutil.pid_exists(int(pid))


def files_of(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Paths and contents. The run continues meanwhile, so listed files and folders may have disappeared."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with suppress(OSError):
                yield path, path.read_bytes()


def test_the_token_is_in_no_file_of_the_run_and_in_no_command_line(folder: Path, run: Run) -> None:
    secrets = [TOKEN.encode(), OTHER_TOKEN.encode()]
    files = list(files_of(run.path))
    assert files
    assert [path for path, content in files if any(secret in content for secret in secrets)] == []
    assert TOKEN not in run.printed
    roles = psutil.Process(run.launcher.pid).children(recursive=True)
    assert len(roles) >= 3
    assert not [role for role in roles if TOKEN in " ".join(role.cmdline())]


@pytest.fixture(scope="module")
def lone_broker(folder: Path) -> Iterator[Path]:
    """The log of a broker that was started manually and has no peers."""
    log, settings = folder / "lone.log", (*SMALL, "name=mine", f"broker.address=ipc://{folder}/lone.sock")
    broker = runs.start(log, [sys.executable, "-m", "slipstream.broker", *settings], folder, SLIPSTREAM_TOKEN=TOKEN)
    try:
        until(lambda: "listening" in log.read_text(), timeout_s=DEADLINE_S, what="a broker")
        yield log
    finally:
        end([broker])


def test_a_mismatched_role_started_by_hand_ends_with_one_error_before_loading(folder: Path, lone_broker: Path) -> None:
    for name, done in end_all(OF_LONE_BROKER, folder, f"broker.address=ipc://{folder}/lone.sock").items():
        joiner = OF_LONE_BROKER[name]
        logged = joiner.event + error_of(done, joiner.error)
        if joiner.event:
            until(lambda: logged in lone_broker.read_text(), timeout_s=30, what="the error in its log")  # noqa: B023
