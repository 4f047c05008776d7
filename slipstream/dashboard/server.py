"""The server of the dashboard: `slipstream watch`."""

import socket
from collections.abc import Sequence

import uvicorn

from slipstream.broker.transport.endpoints import is_loopback
from slipstream.configs.base import ConfigError
from slipstream.dashboard.app import make_app
from slipstream.dashboard.guard import find_token
from slipstream.dashboard.runs import Runs

PORT = 8420
"""Taken unless another is asked for; the next free one if it is in use."""
_STOP_TIMEOUT_S = 2
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def watch(words: Sequence[str], *, host: str, port: int | None, names: Sequence[str]) -> None:
    """Serve the dashboard until Ctrl-C; `words` as for Runs, `names`: further names of this machine.

    Raises ConfigError for a run, a token or an address that cannot be used.
    """
    runs = Runs(words)
    is_open = not is_loopback(host)
    token = find_token(is_open=is_open)
    listening = _listen(host, port)
    at = listening.getsockname()[1]
    hosts = {*_LOOPBACK_NAMES, *names, *((host, socket.gethostname(), socket.getfqdn()) if is_open else (host,))}
    app = make_app(runs, token=token, hosts=hosts, cookie=f"slipstream-{at}")
    shown, number = f"[{host}]" if ":" in host else host, len(runs.ids())
    there = f"{number} run{'s' * (number != 1)}" if number else f"no run yet in {runs.runs_dir}/"
    print(f"{there}: http://{shown}:{at}/?token={token}", flush=True)
    if is_open:
        print(
            "other machines can reach it, and nothing is encrypted between them and here: on a network that is not "
            f"yours, listen on 127.0.0.1 and use `ssh -L {at}:localhost:{at} THIS_HOST`.",
            flush=True,
        )
    else:
        print(f"from another machine: `ssh -L {at}:localhost:{at} THIS_HOST`, then open the same address", flush=True)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, timeout_graceful_shutdown=_STOP_TIMEOUT_S, server_header=False
    )
    uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int | None) -> socket.socket:
    """Listen at a port, by default PORT or else a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (PORT, 0) if port is None else (port,):
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
        except OSError as error:
            listening.close()
            reason = error.strerror or error
        else:
            return listening
    raise ConfigError(f"--host and --port must be an address to listen at, got {host}:{port}: {reason}.")
