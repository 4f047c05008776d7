"""`python -m tests.e2e.resumed_serial OVERRIDE...`: a serial run that stops after its first checkpoint and is resumed.

A serial run's store ends with the run. Here it outlives the first of two runs.
"""

import sys
from contextlib import closing
from pathlib import Path

import msgspec

from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.load import load
from slipstream.launch import serial
from slipstream.launch.serial import TurnClock
from slipstream.learner.learner import Learner
from slipstream.runtime.run_folder import RunFolder


class _StoppedError(Exception):
    """Ends the first run."""


def main(overrides: list[str]) -> None:
    run = load(overrides)
    folder, checkpoint = RunFolder(run), Learner._checkpoint
    folder.claim()
    server = EmbeddedRedis(folder.store, durability="fast")
    server.start()

    def open_store(_folder: Path, name: str, *, clock: TurnClock, **_: int) -> closing[RedisStore]:
        return closing(RedisStore(connect(server.url), name, clock=clock))

    def stop_behind_checkpoint(learner: Learner, **options: bool) -> None:
        checkpoint(learner, **options)
        learner._rank_group.flush_checkpoint()
        raise _StoppedError

    serial.open_own_store = open_store  # type: ignore[assignment]
    Learner._checkpoint = stop_behind_checkpoint  # type: ignore[method-assign]
    try:
        serial.run_serial(run, folder)
    except _StoppedError:
        Learner._checkpoint = checkpoint  # type: ignore[method-assign]
        serial.run_serial(msgspec.structs.replace(run, resume=True), folder)
    finally:
        server.stop()
        folder.unlock()


if __name__ == "__main__":
    main(sys.argv[1:])
