"""Links: the clients of a process, one for each broker that it has joined.

A generator has one client, which goes from broker to broker by itself. The learner has one for every broker.

Consumes: messages of all brokers.
Produces: the learner's messages, to all brokers; their members as one list.
Invariant: the learner has a client for every broker that another one calls alive.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from slipstream.broker.messages import LivingBrokers, Members, MemberState, Message, OpenEpoch, Update, Welcome
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread
from slipstream.broker.transport.endpoints import is_listening, is_own_machine

log = structlog.get_logger(__name__)

Connect = Callable[[str, Callable[[Message], None]], BrokerClient]
"""Address, and a function for the messages from there -> a client."""


@dataclass
class _Link:
    address: str
    broker: str = ""
    """Empty before the first Welcome."""
    client: BrokerClient | None = None
    thread: BrokerClientThread | None = None


class Links:
    """Fulfils Sender; thread-safe. Life: open -> send* -> stop."""

    def __init__(
        self,
        connect: Connect,
        *,
        on_message: Callable[[Message], None],
        joins_all: bool,
        brokers: Mapping[str, str],
        is_reachable: Callable[[str], bool] = is_listening,
    ) -> None:
        """`on_message` gets all messages for the role, on the threads of the clients; `joins_all`: of a learner.

        `brokers`: name -> address, as far as this process knows, for those it cannot reach where they say they are.
        """
        self._connect = connect
        self._on_message = on_message
        self._joins_all = joins_all
        self._brokers = brokers
        self._is_reachable = is_reachable
        self._lock = threading.RLock()
        self._links: list[_Link] = []
        self._is_stopped = False
        self._order: OpenEpoch | Update | None = None
        self._members: dict[str, list[MemberState]] = {}
        """Newest report of each broker, the last to report at the end."""
        self._living: set[str] | None = None
        """Brokers whose members count; None: all."""

    def open(self, address: str, *, broker: str = "") -> tuple[BrokerClient, BrokerClientThread]:
        """Start a client to an address; those to the other brokers follow by themselves once it has joined."""
        link = _Link(address, broker)
        with self._lock:
            self._links.append(link)
        client = link.client = self._connect(address, lambda message: self._receive(link, message))
        # Its members may have missed it on their way from another broker.
        client.order = self._order
        link.thread = BrokerClientThread(client)
        link.thread.start()
        return client, link.thread

    def send(self, message: Message) -> None:
        """Queue a message for every broker: each passes a weight order on to those of its members that it serves."""
        with self._lock:
            if isinstance(message, OpenEpoch | Update):
                self._order = message
            for client in [link.client for link in self._links if link.client]:
                client.send(message)

    def stop(self, *, flush_s: float = 0.0, reason: str = "") -> None:
        """Leave the run at every broker; arguments as for BrokerClientThread.stop."""
        with self._lock:
            self._is_stopped = True
            threads = [link.thread for link in self._links if link.thread]
        for thread in threads:
            thread.stop(flush_s=flush_s, reason=reason)

    def _receive(self, link: _Link, message: Message) -> None:
        match message:
            case Welcome(living=living):
                with self._lock:
                    link.broker = living.broker if living else ""
                    # A broker serves one connection of a learner: two would take turns for ever. One that was left for
                    # its twin leaves none.
                    twins = [each for each in self._links if each.broker == link.broker and each is not link]
                    for twin in twins if link in self._links else ():
                        self._leave(twin)
                self._follow(living)
                self._on_message(message)
            case LivingBrokers():
                self._follow(message)
            case Members(generators=generators):
                with self._lock:
                    self._members.pop(link.broker, None)
                    self._members[link.broker] = generators
                    self._on_message(self._joined())
            case _:
                self._on_message(message)

    def _follow(self, living: LivingBrokers | None) -> None:
        """Open clients to brokers that have none, and leave out the members of those that are gone."""
        with self._lock:
            if not (self._joins_all and living) or self._is_stopped:
                return
            known = {link.broker: link for link in self._links}
            for name in living.brokers.keys() - {living.broker}:
                link = known.get(name)
                address = self._choose(name, living.brokers[name], link)
                if address and (link is None or link.address != address):
                    self._replace(link, name, address)
            before, self._living = self._joined(), set(living.brokers)
            # Generators go on to other brokers, which report them then; or theirs is back, with nothing new to report.
            if (joined := self._joined()) != before:
                self._on_message(joined)

    def _choose(self, broker: str, announced: str, link: _Link | None) -> str:
        """Return the address at which this process joins a broker; empty without one."""
        # Which of the addresses that this process knows is whose, only a Welcome tells.
        taken = {each.address for each in self._links}
        own = [link.address] if link else [address for address in self._brokers.values() if address not in taken]
        # The announced one first, for another role may have taken the port that a broker had. But as seen from here it
        # may be out of reach, where a tunnel is not, and a loopback address that of another process.
        both = [*own, announced] if link and is_own_machine(announced) else [announced, *own]
        addresses = [*filter(None, dict.fromkeys(both))]
        if len(addresses) < 2:
            return "".join(addresses)
        return next(filter(self._is_reachable, addresses), announced)

    def _replace(self, link: _Link | None, broker: str, address: str) -> None:
        if self._is_reachable(address):
            log.info("broker_found", broker=broker, address=address)
        else:
            reason = "nobody listens there, as seen from here: its generators get no weights until it is reached"
            log.warning("broker_not_reached", broker=broker, address=address, reason=reason)
        if link:
            self._leave(link)
        self.open(address, broker=broker)

    def _leave(self, link: _Link) -> None:
        self._links.remove(link)
        if link.thread:
            # It may wait for this lock: it is left to end by itself.
            threading.Thread(target=link.thread.stop, name="leave-broker", daemon=True).start()

    def _joined(self) -> Members:
        # Of two brokers that both have a generator, one hangs or is about to hear of its move: the last one knows more.
        counted = [states for name, states in self._members.items() if self._living is None or name in self._living]
        by_member = {state.member: state for states in counted for state in states}
        return Members(sorted(by_member.values(), key=lambda state: state.member.peer_id))
