"""If this run's broker is not at an address, a peer logs what it waits for and ends in time with one error message."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import zmq

from slipstream.broker.errors import RefusedByBrokerError
from slipstream.broker.transport.session import StatusBoard, join
from slipstream.runtime.clock import WaitTimeoutError
from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests.fakes import KEYS, TOKEN

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1.5
NO_LISTENER, NO_ANSWER = "no process listens there", "a process listens there but does not answer"


@contextmanager
def no_listener(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as freed:
        port = freed.getsockname()[1]
    yield f"tcp://127.0.0.1:{port}"


@contextmanager
def a_dead_socket(folder: Path) -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(folder / "dead.sock"))
    yield f"ipc://{folder}/dead.sock"


@contextmanager
def a_web_server(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"tcp://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def a_silent_router(folder: Path) -> Iterator[str]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        bound.setsockopt(zmq.LINGER, 0)
        bound.bind(f"ipc://{folder}/other.sock")
        yield f"ipc://{folder}/other.sock"


OTHERS = {
    "no listener": (no_listener, NO_LISTENER),
    "a dead socket": (a_dead_socket, NO_LISTENER),
    "a web server": (a_web_server, NO_ANSWER),
    "a silent router": (a_silent_router, NO_ANSWER),
}


def try_to_join(address: str) -> None:
    peer = {"keys": KEYS, "max_message_bytes": 2**20, "peer_id": "lost", "status": StatusBoard()}
    join("generator", address=address, timeout_s=TIMEOUT_S, **peer)


@pytest.mark.parametrize("other", OTHERS)
def test_the_wait_ends_in_time_and_names_what_is_missing(short_folder: Path, other: str) -> None:
    start, missing = OTHERS[other]
    with start(short_folder) as address, pytest.raises(WaitTimeoutError) as caught:
        try_to_join(address)
    assert f"waited {TIMEOUT_S:g} s for the welcome of the broker at {address}; missing: {missing}" in str(caught.value)


def test_an_answer_in_another_protocol_ends_the_wait_immediately(short_folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        # With this run's keys, no other peer gets through.
        bound.curve_server = True
        bound.curve_publickey, bound.curve_secretkey = KEYS.server_public, KEYS.server_secret
        bound.bind(f"ipc://{short_folder}/other.sock")

        def answer() -> None:
            identity, *_ = bound.recv_multipart()
            bound.send_multipart([identity, b"+OK"])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RefusedByBrokerError, match="same version"):
            try_to_join(f"ipc://{short_folder}/other.sock")
        thread.join()


@pytest.mark.slow
def test_the_command_logs_what_is_missing_and_ends_with_exit_code_2(short_folder: Path) -> None:
    with a_web_server(short_folder) as address:
        settings = [f"broker.address={address}", "broker.join_timeout_s=6"]
        command = [sys.executable, "-m", "slipstream.generators", *settings]
        environment = os.environ | {"PYTHONPATH": str(ROOT), TOKEN_VARIABLE: TOKEN}
        limits = {"capture_output": True, "text": True, "timeout": 100, "check": False}
        process = subprocess.run(command, cwd=short_folder, env=environment, **limits)
    assert process.returncode == 2, process.stderr
    waiting, *_, last = process.stderr.strip().splitlines()
    assert f"the broker at {address}: {NO_ANSWER}" in waiting
    assert re.match(r"error: waited [56]\S* s for the welcome of the broker at ", last)
    assert f"{address}; missing: {NO_ANSWER}" in last
    assert "Traceback" not in process.stderr
