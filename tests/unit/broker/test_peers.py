"""A peer cannot override the broker's fields in its report."""

from slipstream.broker.messages import Hello
from slipstream.broker.peers import Peer


def test_gauges_cannot_replace_what_the_broker_knows_of_a_peer():
    peer = Peer(b"", Hello("generator", "g-0", "i", "node", 7), heard_at=0.0, state="ready", version=3)
    peer.gauges = {"role": "learner", "state": "gone", "version": "x", "pid": 1, "tokens": 5}
    known = {"role": "generator", "state": "ready", "version": 3, "reason": "", "host": "node", "pid": 7}
    assert peer.beat({}).gauges == known | {"tokens": 5}
