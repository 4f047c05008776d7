"""Invalid peers, with the real commands: one error message and exit code 2 on their side, the reason in the broker's
log and the run's events, and an unharmed run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from tests import runs
from tests.runs import SMALL, Run, end, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKEN, OTHER_TOKEN = "the-token-of-this-run", "the-token-of-another-run"
DEADLINE_S = 120.0
NEWER = """
import sys
import slipstream.buffer.trajectory
slipstream.buffer.trajectory.SCHEMA_VERSION += 1
from slipstream.generators.__main__ import main
main(sys.argv[1:])
"""


@dataclass(frozen=True)
class Joiner:
    """A peer that must be rejected."""

    command: tuple[str, ...]
    """Python's arguments."""
    error: str
    """Pattern of its error."""
    token: str = TOKEN
    """Token in its environment."""
    home: str = "."
    """Working folder below the test's folder, which contains its model."""
    event: str = "refused: "
    """Start of the run's event; empty if the peer never reached the broker."""


GENERATOR = ("-m", "slipstream.generators", "--id", "stranger")
SAME_MODEL = r"model\.path must hold the same model here as at the broker, got 'models/digits-random' with "
JOINERS = {
    "no token": Joiner(
        GENERATOR,
        r"the token must be that of the broker at ipc:.*, got none: set SLIPSTREAM_TOKEN",
        "",
        "wide",
        event="",
    ),
    "another token": Joiner(
        GENERATOR, r"the token must be that of the broker at .* got another", OTHER_TOKEN, event=""
    ),
    "a token for all to read": Joiner(
        (*GENERATOR, "broker.token_file=open_token"), r"mode 0644 of open_token: chmod 600 open_token", "", event=""
    ),
    "a taken id": Joiner(
        ("-m", "slipstream.generators", "--id", "generator-0"),
        r"peer id 'generator-0' must be unique, but process \d+ on ",
    ),
    "the name of a role": Joiner(
        ("-m", "slipstream.generators", "--id", "broker"), r"a generator's id must not be a role's name, got 'broker'"
    ),
    "a newer version": Joiner(("-c", NEWER, *GENERATOR[2:]), r"schema version must be \d+, got \d+ from 'stranger'"),
    "a larger vocabulary": Joiner(
        GENERATOR, SAME_MODEL + r"vocab_size \d+ here and \d+ at", home="wide", event="left: "
    ),
    "another tokenizer": Joiner(GENERATOR, SAME_MODEL + r"tokenizer\.json of hash ", home="renamed", event="left: "),
    "an id that would write into logs": Joiner(
        ("-m", "slipstream.generators", "--id", "x\x1b[2J"), r"--id must be made of letters", event=""
    ),
    "a second learner": Joiner(("-m", "slipstream.learner", *SMALL), r"a run has one learner, but process \d+ on "),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = runs.make_task(tmp_path_factory.mktemp("join"), warm=False)
    for home in ("wide", "renamed"):
        shutil.copytree(made / "models", made / home / "models")
    change(made / "wide/models/digits-random/config.json", r'"vocab_size": \d+', '"vocab_size": 999')
    change(made / "renamed/models/digits-random/tokenizer.json", '"="', '"~"')
    for name, token, mode in (("open", OTHER_TOKEN, 0o644), ("private", TOKEN, 0o600), ("other", OTHER_TOKEN, 0o600)):
        (made / f"{name}_token").write_text(token)
        (made / f"{name}_token").chmod(mode)
    return made


def change(path: Path, pattern: str, replacement: str) -> None:
    changed, count = re.subn(pattern, replacement, path.read_text())
    assert count
    path.write_text(changed)


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


def join(folder: Path, joiner: Joiner, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *joiner.command, *overrides],
        cwd=folder / joiner.home,
        env={**os.environ, "SLIPSTREAM_TOKEN": joiner.token},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def assert_one_error(process: subprocess.CompletedProcess[str], pattern: str) -> str:
    assert process.returncode == 2, process.stdout + process.stderr
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, process.stderr
    assert re.search(pattern, errors[0]), errors[0]
    assert "Traceback" not in process.stderr
    assert TOKEN not in process.stdout + process.stderr
    assert OTHER_TOKEN not in process.stdout + process.stderr
    return errors[0].removeprefix("error: ")


def has_event(run: Run, beginning: str) -> bool:
    with closing(open_run_store(EmbeddedRedis(run.path / "store").url, run.name, timeout_s=20)) as store:
        return any(event.text.startswith(beginning) for event in store.events(limit=256))


@pytest.mark.parametrize("name", JOINERS)
def test_a_bad_joiner_ends_with_one_error_and_the_run_continues(folder: Path, run: Run, name: str) -> None:
    joiner, steps = JOINERS[name], run.steps
    error = assert_one_error(
        join(folder, joiner, "name=guarded", f"broker.address=ipc://{folder}/guarded.sock"), joiner.error
    )
    if joiner.event:
        until(lambda: has_event(run, joiner.event + error), timeout_s=30, what="an event with the reason")
        assert error in run.log("broker")
    until(lambda: run.steps > steps + 2, timeout_s=DEADLINE_S, what="further steps")
    assert "restarted" not in run.printed


def test_a_second_launcher_is_refused_and_the_store_of_the_first_lives_on(folder: Path, run: Run) -> None:
    def store_pid() -> int:
        return int((run.path / "store/redis.pid").read_text())

    pid, steps = store_pid(), run.steps
    second = Joiner(tuple(runs.command(*SMALL, "resume=true")[1:]), "must have one launcher, .* but process")
    assert str(run.launcher.pid) in assert_one_error(join(folder, second, "name=guarded"), second.error)
    until(lambda: run.steps > steps + 2, timeout_s=DEADLINE_S, what="further steps")
    assert store_pid() == pid
    assert psutil.pid_exists(pid)


def test_the_status_of_the_run_shows_rejected_peers(folder: Path, run: Run) -> None:
    joiner = Joiner((*GENERATOR, "broker.token_file=other_token"), "got another one", token="")
    assert_one_error(join(folder, joiner, f"broker.address=ipc://{folder}/guarded.sock"), joiner.error)

    def is_shown() -> bool:
        process = subprocess.run(
            runs.command("status", "name=guarded", "--json"), cwd=folder, capture_output=True, text=True, check=True
        )
        return any(
            "connections without the run's token" in event["text"] for event in json.loads(process.stdout)["events"]
        )

    until(is_shown, timeout_s=60, what="an event in the status")


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


LEARNERS = {
    "settings of another run": Joiner(
        ("-m", "slipstream.learner", *SMALL),
        r"settings must match the broker's, got differences in name",
        event="left: ",
    ),
    "another model": Joiner(
        ("-m", "slipstream.learner", *SMALL, "name=mine"),
        SAME_MODEL + "vocab_size 999 here",
        home="wide",
        event="left: ",
    ),
}


@pytest.fixture(scope="module")
def lone_broker(folder: Path) -> Iterator[Path]:
    """The log of a broker that was started manually and has no peers."""
    log = folder / "lone.log"
    command = [
        sys.executable,
        "-m",
        "slipstream.broker",
        *SMALL,
        "name=mine",
        f"broker.address=ipc://{folder}/lone.sock",
    ]
    with log.open("w") as output:
        environment = {**os.environ, "SLIPSTREAM_TOKEN": TOKEN}
        broker = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
    try:
        until(lambda: "listening" in log.read_text(), timeout_s=DEADLINE_S, what="a broker")
        yield log
    finally:
        end([broker])


@pytest.mark.parametrize("name", LEARNERS)
def test_a_mismatched_learner_reports_its_error_to_the_broker_before_loading(
    folder: Path, lone_broker: Path, name: str
) -> None:
    joiner = LEARNERS[name]
    process = join(folder, joiner, f"broker.address=ipc://{folder}/lone.sock")
    error = assert_one_error(process, joiner.error)
    until(lambda: f"left: {error}" in lone_broker.read_text(), timeout_s=30, what="the error in the broker's log")
