"""python -m generators.rewards.worker FD: the process that calls the reward function, one sample after the other.

Consumes: a Job, then RewardInputs, from the socket that FD is. Produces: a Reward for each, in order.
Waits for: its pool. It may be killed at any moment: it holds nothing.
"""

import signal
import socket
import sys
from collections.abc import Iterator

from broker.process import die_with_parent
from generators.rewards.frames import FrameCutter, decode_job, decode_sample, frame
from generators.rewards.reward import evaluate, load_reward

_READ_BYTES = 1 << 16


def main(fd: int) -> None:
    """Serve until the pool closes the socket."""
    _die_with_parent()
    with socket.socket(fileno=fd) as pool:
        bodies = _receive(pool)
        first = next(bodies, None)
        if first is None:  # the pool closed before it had anything to score
            return
        job = decode_job(first)
        function = load_reward(job.function, job.arguments)
        pool.sendall(frame(None))
        for body in bodies:
            pool.sendall(frame(evaluate(function, decode_sample(body))))


def _receive(pool: socket.socket) -> Iterator[bytes]:
    cutter = FrameCutter()
    while data := pool.recv(_READ_BYTES):
        yield from cutter.feed(data)


def _die_with_parent() -> None:
    # A worker stuck in a reward function does not see the socket close: the kernel has to end it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
