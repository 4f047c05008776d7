"""`slipstream status` on a real store with live and dead roles, and without a store."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.store import RedisStore
from slipstream.cli import main
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.launch.commands import profile
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run
from tests.contract.stores import lease, make_ready, open_run
from tests.fakes import FakeClock

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0


@pytest.fixture
def config(short_folder: Path) -> RunConfig:
    # Longer than any start of a Python process on a busy machine.
    timeouts = {"peer_timeout_s": 300.0}
    return make_run(name="mine", runs_dir=str(short_folder), broker=timeouts, learner={"max_steps": 200})


@pytest.fixture
def store(server: EmbeddedRedis, config: RunConfig) -> Iterator[RedisStore]:
    """A run in training with three roles, the generator silent for an hour."""
    clock = FakeClock(time.time() - 3600)
    filled = RedisStore(connect(server.url), "mine", clock=clock)
    open_run(filled, config_json=msgspec.json.encode(config).decode())
    filled.set_phase("training")
    make_ready(filled, 3)
    lease(filled, 1)
    filled.report_role("generator-0", {"role": "generator", "state": "ready", "version": 0, "tokens": 5.0})
    filled.record_event("generator-0", "died (signal SIGKILL); restarting in 1 s")
    clock.now = time.time()
    filled.report_role("broker", {"role": "broker", "state": "ready"})
    filled.report_role("learner", {"role": "learner", "state": "ready", "reason": "training step 1"})
    yield filled
    filled.close()


@pytest.fixture
def status(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command: its exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(["status", "name=mine", f"runs_dir={config.runs_dir}", *arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run


def test_the_screen_shows_silent_roles_json_is_one_object_and_reading_changes_nothing(status, store):
    before = store.counts(), store.run_state(), store.roles()
    # It cannot be written to after a failover that demoted its machine to a replica.
    store._client.replicaof("127.0.0.1", 1)
    try:
        (code, screen, errors), (_, printed, _) = status(), status("--json")
    finally:
        store._client.replicaof("NO", "ONE")
    assert code == 0, errors
    reported = json.loads(printed)
    silent = next(line for line in screen.splitlines() if line.split()[:1] == ["generator-0"])
    assert "SILENT, was ready" in silent
    assert "1h00m" in silent
    for part in (
        "mine · training",
        "the learner for the generators: no generator is alive",
        "lag 0: 3",
        "died (signal SIGKILL); restarting in 1 s",
    ):
        assert part in screen
    assert (reported["run"], reported["phase"], reported["ready_by_lag"]) == ("mine", "training", {"0": 3})
    livenesses = {role["name"]: role["liveness"] for role in reported["roles"]}
    assert livenesses == {"broker": "alive", "learner": "alive", "generator-0": "silent"}
    assert (store.counts(), store.run_state(), store.roles()) == before


def test_a_store_without_the_run_is_one_sentence_and_a_finished_run_shows_its_results(config, server, status):
    code, _, errors = status()
    assert (code, len(errors.splitlines())) == (1, 1)
    server.stop()
    summary = {"steps": 4, "accuracy_greedy": 0.25, "num_final_prompts": {"greedy": 8}}
    RunFolder(config).write_summary(summary)
    code, screen, errors = status()
    assert (code, errors) == (0, "")
    assert "mine: done after 4 steps; final evaluation on 8 prompts: accuracy 0.250 greedy" in screen
    assert "summary.json" in screen
    ended = {"run": "mine", "phase": "finished", "step": 4, "max_steps": 200, "summary": summary}
    assert json.loads(status("--json")[1]) == ended


def test_a_profile_is_asked_for_with_steps_that_the_run_will_make(config, store, capsys):
    profile(["mine", f"runs_dir={config.runs_dir}"], num_steps=3)
    lead = (config.staleness.max_lag + 1) * config.weights.publish_every_steps
    assert f"steps {lead + 2} to {lead + 4} are recorded" in capsys.readouterr().out
    assert store.take_requests("learner") == {"profile": f"{lead + 2} {lead + 4}"}


@pytest.mark.parametrize(
    ("words", "num_steps", "change", "sentence"),
    [
        (["mine"], 1000, {}, r"--steps must be <= \d+, got 1000: recording can start at step"),
        (["mine"], 3, {"profile": "5 to 9"}, "must not be recording already, got steps 5 to 9"),
        (["mine"], 3, {"phase": "finished"}, "needs a run that trains, got run 'mine', which is finished"),
        (["mien"], 3, {}, "did you mean 'mine'"),
    ],
)
def test_a_profile_that_cannot_be_is_one_sentence(config, store, words, num_steps, change, sentence):
    if "phase" in change:
        store.set_phase(change["phase"])
    store.report_role("learner", {"role": "learner", "state": "ready"} | change)
    with pytest.raises(ConfigError, match=sentence):
        profile([*words, f"runs_dir={config.runs_dir}"], num_steps=num_steps)
    assert store.take_requests("learner") == {}


@pytest.mark.usefixtures("server")
def test_a_run_in_one_process_has_no_profile(config):
    serial = make_run(name="mine", runs_dir=config.runs_dir, mode="serial", weights={"transport": "memory"})
    (RunFolder(config).path / "config.yaml").write_bytes(msgspec.yaml.encode(serial))
    with pytest.raises(ConfigError, match=r"got serial: start another run with profile.steps"):
        profile(["mine", f"runs_dir={config.runs_dir}"], num_steps=3)


def test_a_watch_shows_changes_and_ends_cleanly_at_ctrl_c(config, store):
    command = [sys.executable, "run_async.py", "status", "--watch", f"runs_dir={config.runs_dir}"]
    terminal, inside = os.openpty()
    watch = subprocess.Popen(command, cwd=ROOT, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
    os.close(inside)
    try:
        wait_for_text(terminal, "mine · training")
        store.set_phase("finishing")
        wait_for_text(terminal, "mine · finishing")
        watch.send_signal(signal.SIGINT)
        read_to_end(terminal)
        assert watch.wait(timeout=DEADLINE_S) == 0
    finally:
        watch.kill()
        watch.wait()
        os.close(terminal)


def wait_for_text(terminal: int, text: str) -> None:
    """Read the terminal until `text` appears. Bounded only by pytest's timeout."""
    shown = b""
    while text.encode() not in shown:
        shown += os.read(terminal, 65536)


def read_to_end(terminal: int) -> None:
    """Read until the other side has closed it, because a process that writes to a full terminal blocks."""
    with suppress(OSError):
        while select.select([terminal], [], [], DEADLINE_S)[0] and os.read(terminal, 65536):
            pass
