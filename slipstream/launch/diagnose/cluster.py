"""`slipstream diagnose cluster`: check a machine and its connection to a broker, without joining."""

import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing

import msgspec

from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.handshake import MAX_BYTES, Inspect, Inspected
from slipstream.broker.messages import LivingBrokers
from slipstream.broker.transport.endpoints import find_last_port, is_listening, machine_id
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, is_refused
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import SCHEMA_VERSION
from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import ClusterConfig
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.launch.diagnose import machine
from slipstream.launch.diagnose.machine import Result, judge
from slipstream.runtime.command_line import add_row, make_console, make_table
from slipstream.runtime.credentials import TOKEN_REMEDY, Keys, derive_keys, find_token
from slipstream.runtime.process import versions

_FAILED = 1
_ANSWER_TIMEOUT_S = 10.0
_BANDWIDTH_S = 5.0
_AHEAD = 8
"""Requests in flight at a time."""


def report(findings: Sequence[Result], *, is_json: bool) -> None:
    """Print findings; exit with 1 if any check failed."""
    if is_json:
        print(msgspec.json.encode({"host": socket.gethostname(), "checks": findings}).decode())
    else:
        table = make_table("check", "verdict", "found", "fix")
        for each in findings:
            add_row(table, each.name, each.verdict, "below" if "\n" in each.found else each.found, each.fix)
        make_console().print(table)
        # Columns in a cell would be wrapped.
        print("".join(f"\n{each.name}:{each.found}\n" for each in findings if "\n" in each.found), end="")
    if any(each.verdict == "fail" for each in findings):
        raise SystemExit(_FAILED)


def find_all(overrides: list[str]) -> list[Result]:
    """Check this machine and, if `broker.address` is set, that broker. Raises ConfigError."""
    given = load(overrides)
    address = given.broker.address
    token = machine.check_token(given, is_joining=address is not None)
    if address is None or token.verdict == "fail":
        return [token, *_of_the_machine(given)]
    keys = derive_keys(find_token(given))
    try:
        if not is_listening(address):
            fix = "correct broker.address, start the broker, or open its port in the firewalls between the machines"
            unreached = Result("broker", "fail", f"nothing accepts a connection at {address}", fix=fix)
        elif is_refused(address, keys):
            unreached = Result("broker", "fail", f"{address} has another token", fix=TOKEN_REMEDY)
        else:
            limit = given.broker.max_message_bytes
            with closing(ZmqClientChannel(address, keys=keys, max_message_bytes=limit)) as channel:
                return [token, *_with_link(BrokerLink(channel), given, overrides, address=address, keys=keys)]
    except ChannelClosedError as error:
        raise ConfigError(str(error)) from None
    return [token, unreached, *_of_the_machine(given)]


def _of_the_machine(run: RunConfig, *, answer: Inspected | None = None) -> list[Result]:
    return [
        machine.check_versions(run, versions(), answer.versions if answer else None),
        machine.check_interface(run.cluster),
        machine.check_ports(run.cluster),
        machine.check_shared_memory(),
        machine.check_open_files(),
        machine.check_locked_memory(),
    ]


def _with_link(link: "BrokerLink", given: RunConfig, overrides: list[str], *, address: str, keys: Keys) -> list[Result]:
    asked_at = time.time()
    answer = link.ask(Inspect(machine=machine_id()))
    took_s = time.time() - asked_at
    if answer is None:
        fix = "wait until it serves (it may wait for its store: see its log), and run the same version on both sides"
        silent = Result("broker", "fail", f"{address} does not answer within {_ANSWER_TIMEOUT_S:g} s", fix=fix)
        return [silent, *_of_the_machine(given)]
    found, is_same = f"run {answer.run_id!r} at {address}", answer.schema_version == SCHEMA_VERSION
    found += "" if is_same else f", schema version {answer.schema_version} instead of {SCHEMA_VERSION}"
    run = msgspec.json.decode(answer.config_json, type=RunConfig)
    is_named = any(text.lstrip("+").startswith("model.path=") for text in overrides)
    return [
        judge("broker", is_same, found, fix="update the older side", verdict="fail"),
        machine.check_model(given.model.path if is_named else run.model.path, answer.model),
        machine.check_clock(answer.time - (asked_at + took_s / 2), took_s=took_s),
        _check_reached(link, run.cluster),
        _check_brokers(answer.living),
        _check_weights(answer.weights_at, keys),
        _check_bandwidth(link, run, answer),
        *_of_the_machine(run, answer=answer),
    ]


# --- the broker ------------------------------------------------------------------------------------------------------
class BrokerLink:
    """Inspection requests to a broker."""

    def __init__(self, channel: ZmqClientChannel) -> None:
        self._channel = channel

    def ask(self, question: Inspect) -> Inspected | None:
        self._channel.send([encode(question)])
        return self._receive(timeout_s=_ANSWER_TIMEOUT_S)

    def measure(self, num_bytes: int) -> tuple[int, float]:
        """Fetch up to `num_bytes`; return (bytes received, seconds taken)."""
        began_at, asked, received = time.monotonic(), 0, 0
        under_way: deque[int] = deque()
        while received < num_bytes and time.monotonic() - began_at < _BANDWIDTH_S:
            while len(under_way) < _AHEAD and asked < num_bytes:
                under_way.append(size := min(MAX_BYTES, num_bytes - asked))
                asked += size
                self._channel.send([encode(Inspect(num_bytes=size))])
            if self._receive(timeout_s=_BANDWIDTH_S) is None:
                break
            received += under_way.popleft()
        return received, time.monotonic() - began_at

    def _receive(self, *, timeout_s: float) -> Inspected | None:
        frames = self._channel.receive(timeout_s=timeout_s)
        try:
            return decode(frames[0], Inspected) if frames else None
        except RecordRefusedError:
            return None


def _check_reached(link: BrokerLink, cluster: ClusterConfig) -> Result:
    if cluster.network is None:
        return Result("way back", "ok", "not needed: the run has no cluster.interface")
    try:
        listener = socket.create_server(find_last_port(cluster))
    except (ConfigError, OSError) as error:
        return Result("way back", "warn", f"not tried: {error}", fix="correct interface and ports")
    with listener:
        host, port = listener.getsockname()
        answer = link.ask(Inspect(listens_at=f"tcp://{host}:{port}"))
    if answer is None or answer.is_reached is None:
        return Result("way back", "warn", "not tried by the broker", fix="ask again: it tries few machines at a time")
    if answer.is_reached:
        return Result("way back", "ok", f"the broker reaches {host}:{port}")
    fix = f"open {cluster.ports} of this machine for the broker's; weights.transport=delta needs no way back"
    return Result("way back", "fail" if cluster.trusted_network else "warn", f"{host}:{port} is not reached", fix=fix)


def _check_brokers(living: LivingBrokers | None) -> Result:
    """Try the other brokers, because a generator's hash selects its broker."""
    if living is None:
        return Result("brokers", "ok", "the run has one")
    others = {name: address for name, address in sorted(living.brokers.items()) if name != living.broker}
    away = {name: address for name, address in others.items() if not (address and is_listening(address))}
    unreached = [f"{name} at {address or 'no address for other machines'}" for name, address in away.items()]
    if not unreached:
        return Result("brokers", "ok", f"{len(others)} more: all are reached" if others else "no other lives")
    fix = "open their ports for this machine, or forward all of them: until then a generator stays at those it reaches"
    return Result("brokers", "warn", f"{', '.join(unreached)}: not reached", fix=fix)


def _check_weights(address: str, keys: Keys) -> Result:
    if not address:
        fix = "ask again once it has; it has a port with cluster.interface, or weights.fetch_address for a tunnel"
        return Result("weights", "warn", "not tried: no learner with a port has joined the broker", fix=fix)
    if not is_listening(address):
        fix = "open its port for this machine in the firewalls between them, or as a tunnel"
        return Result("weights", "fail", f"{address} is not reached", fix=fix)
    if is_refused(address, keys):
        return Result("weights", "fail", f"{address} has another token: it belongs to another run", fix=TOKEN_REMEDY)
    return Result("weights", "ok", f"{address} is reached")


def _check_bandwidth(link: BrokerLink, run: RunConfig, answer: Inspected) -> Result:
    received, took_s = link.measure(run.weights.bucket_bytes)
    if not received:
        return Result("bandwidth", "fail", "nothing received", fix="check whether the link or the broker is overloaded")
    rate = received / max(took_s, 1e-6)
    found = f"{rate / 2**20:,.0f} MiB/s from the broker"
    if answer.model is None or answer.model.num_parameters is None:
        return Result("bandwidth", "ok", found)
    version_s = answer.model.num_parameters * (4 if run.model.dtype == "float32" else 2) / rate
    found, limit_s = f"{found}: {version_s:,.1f} s for a whole version", run.weights.fetch_timeout_s
    fix = f"raise weights.fetch_timeout_s ({limit_s:g}); later versions come as differences with delta"
    return judge("bandwidth", version_s <= limit_s, found, fix=fix, verdict="fail")
