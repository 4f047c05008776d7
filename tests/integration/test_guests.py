"""A real run with guests that use their own models: the lying one is detected and removed, the honest one continues."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests import runs
from tests.runs import SMALL, Run, end, left_behind, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

HF = tuple(word for word in SMALL if not word.startswith("generators"))
SETTINGS = [
    *("generators/engine=hf", "learner.max_steps=100000", "learner.stall.policy=wait"),
    *("learner.optimizer.learning_rate=0.0001", "cluster.untrusted_generators.names=[alice,mallory]"),
    "cluster.untrusted_generators.audit_fraction=0.5",
]
DEADLINE_S = 120.0
LIAR = """
import sys
import msgspec
import numpy as np
from slipstream.generators.__main__ import main
from slipstream.generators.agents.runner import AgentRunner

honest = AgentRunner.answer

async def answer(self, prompt, index):
    trajectory = await honest(self, prompt, index)
    invented = np.where(trajectory.model_mask, -1.0, 0.0).astype(np.float32)
    return msgspec.structs.replace(trajectory, generator_logprobs=invented)

AgentRunner.answer = answer
main(sys.argv[1:])
"""


def start_guest(run: Run, folder: Path, name: str, *program: str) -> "subprocess.Popen[str]":
    """A guest has an address and a token, but no run folder."""
    token = (run.path / "guests" / name).read_text().strip()
    address = f"broker.address=ipc://{(run.path / 'sockets').resolve()}/broker.sock"
    command = [sys.executable, *program, address, "runs_dir=elsewhere"]
    return runs.start(folder / f"{name}.log", command, folder, **{TOKEN_VARIABLE: token})


def written_by(run: Run, name: str) -> int:
    return sum(stored.trajectory.generator_id == name for stored in Archive(run.path / "archive").read())


def test_a_liar_among_guests_is_quarantined_and_nothing_of_it_is_trained_on_any_more(folder: Path) -> None:
    run = Run(folder, "mine", *SETTINGS, base=HF)
    with run.ended_at_last():
        until(lambda: run.steps >= 1 or run.launcher.poll() is not None, timeout_s=DEADLINE_S, what="training")
        honest = start_guest(run, folder, "alice", "-m", "slipstream.generators")
        liar = start_guest(run, folder, "mallory", "-c", LIAR)
        try:
            until(lambda: liar.poll() is not None, timeout_s=DEADLINE_S, what=f"the end of the liar: {run.printed}")
            assert liar.returncode == 0, "drained"
            with closing(open_run_store(EmbeddedRedis(run.path / "store").url, run.name, timeout_s=20)) as store:
                ((name, sentence),) = store.quarantined_guests().items()
                step = store.run_state().step
                events = [event.text for event in store.events(limit=256) if event.role == "mallory"]
            assert name == "mallory"
            assert sentence.startswith("its log-probabilities must be those of the policy within 0.05 nats on average")
            assert any(text.startswith("quarantined, with ") and text.endswith(sentence) for text in events), events
            assert sentence in run.log("broker")
            again = start_guest(run, folder, "mallory", "-m", "slipstream.generators")
            assert again.wait(timeout=DEADLINE_S) == 2
            refusal = "guest 'mallory' is quarantined and may not join again: its log-probabilities"
            assert refusal in (folder / "mallory.log").read_text()
            until(lambda: run.steps > step + 3, timeout_s=DEADLINE_S, what="more steps")
            until(lambda: written_by(run, "alice") > 8, timeout_s=DEADLINE_S, what="answers of the honest guest")
            assert honest.poll() is None
        finally:
            end([honest])
            liar.kill()
    counts, _, audit = left_behind(run)
    assert audit.is_sound, audit
    assert counts.reasons.keys() <= {"quarantined: guest: mallory"}
    found = [*Archive(run.path / "archive").read()]
    lies = [stored for stored in found if stored.trajectory.generator_id == "mallory"]
    assert lies
    # A step in progress completes.
    assert max((step_of for stored in lies for step_of in stored.steps), default=0) <= step + 1
    assert {stored.state for stored in found if stored.trajectory.generator_id == "alice"} == {"retired"}
