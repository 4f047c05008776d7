"""Joining: how a peer process gets from an address to a Welcome."""

import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import structlog

from slipstream.broker.messages import Hello, Member, Welcome
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread, PeerStatus
from slipstream.broker.transport.inbox import QueueInbox
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, somebody_listens
from slipstream.runtime.clock import Deadline

_SAY_EVERY_S = 5.0

log = structlog.get_logger(__name__)


@dataclass
class Session:
    """A peer that the broker has welcomed."""

    client: BrokerClient
    """To send with."""
    thread: BrokerClientThread
    """Steps the link; stop it at the end."""
    inbox: QueueInbox
    """What arrives."""
    welcome: Welcome
    """What the broker told us of the run."""
    member: Member
    """Our name in membership epochs."""

    @contextmanager
    def leave_at_exit(self, *, flush_s: float = 0.0) -> Iterator[None]:
        """Say Bye at the end; when a fault ends the role, with its sentence, so that the broker knows why."""
        reason = ""
        try:
            yield
        except Exception as fault:
            reason = str(fault).strip() or type(fault).__name__
            raise
        finally:
            self.thread.stop(flush_s=flush_s, reason=reason)


class StatusBoard:
    """The status a role shows in its Pongs: a role replaces it, the link's thread reads it."""

    def __init__(self) -> None:
        self._read: Callable[[], PeerStatus] = lambda: PeerStatus("starting", reason="loading")

    def __call__(self) -> PeerStatus:
        """The status now."""
        return self._read()

    def set_source(self, read: Callable[[], PeerStatus]) -> None:
        """From now on show what `read` returns."""
        self._read = read


def join(
    role: Literal["generator", "learner"],
    *,
    address: str,
    max_message_bytes: int,
    peer_id: str,
    status: StatusBoard,
    timeout_s: float,
    token: str = "",
    weight_transport: Literal["", "collective", "snapshot", "delta"] = "",
) -> Session:
    """Connect and wait for the Welcome, saying every few seconds what is missing.

    Raises RefusedByBrokerError when the broker will not have us, WaitTimeoutError after `timeout_s`.
    """
    hello = Hello(
        role,
        peer_id,
        uuid.uuid4().hex,
        socket.gethostname(),
        os.getpid(),
        weight_transport=weight_transport,
        token=token,
    )
    inbox = QueueInbox()
    channel = ZmqClientChannel(address, max_message_bytes=max_message_bytes)
    client = BrokerClient(channel, hello=hello, status=status, on_message=inbox.put, on_end=inbox.put)
    thread = BrokerClientThread(client)
    thread.start()
    try:
        welcome = _wait_for_welcome(thread, inbox, address=address, timeout_s=timeout_s)
    except BaseException:
        thread.stop()
        raise
    return Session(client, thread, inbox, welcome, Member(peer_id, hello.incarnation))


def _wait_for_welcome(thread: BrokerClientThread, inbox: QueueInbox, *, address: str, timeout_s: float) -> Welcome:
    deadline = Deadline(timeout_s, what=f"the welcome of the broker at {address}")
    while True:
        message = inbox.get(timeout_s=min(_SAY_EVERY_S, max(0.1, deadline.left_s)))
        if isinstance(message, Welcome):
            return message
        if thread.error:
            raise thread.error
        missing = _what_is_missing(address)
        deadline.check(missing=missing)
        log.info("waiting", for_=f"the broker at {address}: {missing}")


def _what_is_missing(address: str) -> str:
    if somebody_listens(address):
        return (
            "somebody listens there, but gives no answer: a broker that waits for its store, or another program; "
            "look at that process's log, or correct broker.address"
        )
    return "nobody listens there; start a broker with `python -m broker`, or correct broker.address"
