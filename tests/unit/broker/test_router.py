"""The router leases prompts, stores trajectories and tracks peers that join and leave."""

from pathlib import Path

from slipstream.broker.messages import (
    Ack,
    Bye,
    Hello,
    LeaseRequest,
    Members,
    OpenEpoch,
    Pong,
    Put,
    Refuse,
    ReturnLeases,
    Welcome,
)
from slipstream.buffer.codec import encode
from tests.builders import make_packed
from tests.fakes import FakePeer, RouterScene


def test_a_hello_is_answered_with_the_whole_config(scene: RouterScene):
    peer = FakePeer(scene, "generator", "g0")
    (welcome,) = peer.receive()
    assert isinstance(welcome, Welcome)
    assert welcome.config_json == scene.config_json
    assert (welcome.store_url, welcome.living) == ("", None)


def test_prompts_are_leased_up_to_the_pacing_limit_and_then_refused_with_the_reason(scene: RouterScene):
    peer = scene.join()
    prompts = peer.lease().prompts
    assert [p.lease.group_id for p in prompts] == ["0", "1"]
    assert peer.exchange(LeaseRequest(max_trajectories=4)) == []
    scene.tick(1.0)
    (answer,) = peer.receive()
    assert answer.prompts == []
    assert "pacing" in answer.reason


def test_a_full_store_stops_admission_and_the_answer_gives_the_reason(tmp_path: Path):
    scene = RouterScene(tmp_path, capacity={"max_mib": 1})
    peer = scene.join()
    (first,) = peer.lease(max_trajectories=2).prompts
    heavy = {"data_source": "x" * 600_000}
    for index in (0, 1):
        header, payload = make_packed(first.lease.group_id, index, group_size=2, **heavy)
        peer.exchange(Put([header]), payload)
    assert peer.exchange(LeaseRequest(max_trajectories=2)) == []
    scene.tick(1.0)
    (answer,) = peer.receive()
    assert answer.prompts == []
    assert answer.reason == "capacity: 1.1 MiB are stored, buffer.capacity.max_mib is 1"


def test_a_trajectory_is_acknowledged_once_it_is_stored_and_a_duplicate_again(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    header, payload = make_packed("0", 0)
    assert peer.exchange(Put([header]), payload) == [Ack([header.id])]
    assert peer.exchange(Put([header]), payload) == [Ack([header.id])]
    assert scene.store.counts().accepted == 1
    assert scene.store.counts().duplicates == 1


def test_a_peer_that_changes_its_name_on_one_connection_loses_its_leases(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    peer.exchange(Hello("generator", "g1", "1", "here", 1))
    assert scene.store.counts().returned == 2


def test_leases_of_a_silent_generator_go_to_another(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    scene.wait(scene.run.broker.peer_timeout_s + 1)
    assert scene.store.counts().returned == 2
    other = scene.join("g1")
    assert [p.lease.attempt for p in other.lease().prompts] == [1, 1]


def test_a_generator_that_is_silent_for_longer_than_its_leases_keeps_them_until_it_counts_as_gone(tmp_path: Path):
    scene = RouterScene(tmp_path, settings={"broker": {"lease_s": 3.0}})
    peer = FakePeer(scene, "generator", "g0")
    peer.exchange(Pong(0.0, "ready", 0, lease_ids=[each.lease.id for each in peer.lease().prompts]))
    scene.wait(scene.run.broker.peer_timeout_s - 0.5)
    assert scene.store.counts().leased == 2
    scene.wait(2.0)
    assert scene.store.counts().returned == 2


def test_a_time_in_which_the_broker_was_stopped_is_no_silence_of_its_peers(scene: RouterScene):
    peer = scene.join()
    peer.lease()
    scene.tick(scene.run.broker.peer_timeout_s + 1)
    assert scene.store.counts().leased == 2
    scene.wait(scene.run.broker.peer_timeout_s + 1)
    assert scene.store.counts().returned == 2


def test_a_request_is_not_answered_on_a_connection_that_was_replaced(scene: RouterScene):
    other, peer = (FakePeer(scene, "generator", name) for name in ("g1", "g0"))
    other.lease()
    assert peer.exchange(LeaseRequest(max_trajectories=4))[1:] == []
    again = FakePeer(scene, "generator", "g0")
    other.exchange(Bye())
    scene.step()
    assert (scene.store.counts().leased, scene.store.counts().returned) == (0, 2)
    assert [prompt.lease.attempt for prompt in again.lease().prompts] == [1, 1]


def test_leases_listed_in_pongs_are_renewed_and_others_lapse(scene: RouterScene):
    peer = scene.join()
    held = peer.lease().prompts[0].lease.id
    for _ in range(int(scene.run.broker.lease_s) + 3):
        scene.clock.now += 1.0
        peer.exchange(Pong(0.0, "ready", 0, lease_ids=[held]))
    assert scene.store.counts().leased == 1
    assert scene.store.counts().returned == 1


def test_returned_leases_and_a_bye_make_the_prompts_available_again(scene: RouterScene):
    peer = scene.join()
    first, _ = (p.lease.id for p in peer.lease().prompts)
    peer.exchange(ReturnLeases([first], "test"))
    assert scene.store.counts().returned == 1
    peer.exchange(Bye())
    assert scene.store.counts().returned == 2


def test_prompts_that_cannot_be_delivered_are_available_again(scene: RouterScene):
    peer = scene.join()
    peer.channel.send([encode(LeaseRequest(max_trajectories=4))])
    # It sends its request and disconnects before the answer.
    peer.channel.close()
    scene.step()
    assert (scene.store.counts().leased, scene.store.counts().returned) == (0, 2)


def test_the_learner_receives_the_members_and_its_orders_reach_those_it_names(scene: RouterScene):
    learner = scene.join("learner", role="learner")
    first, second = scene.join("g0"), scene.join("g1")
    first.exchange(Pong(0.0, "unsynced", -1))
    members = [m for m in learner.receive() if isinstance(m, Members)][-1]
    assert [(g.member.peer_id, g.state) for g in members.generators] == [("g0", "unsynced"), ("g1", "starting")]
    order = OpenEpoch(1, [members.generators[0].member], "127.0.0.1", 1, 1.0)
    learner.exchange(order)
    assert first.receive() == [order]
    assert second.receive() == []


def test_an_unknown_peer_is_answered_with_bye(scene: RouterScene):
    peer = FakePeer(scene, "generator", "g0")
    peer.exchange(Bye())
    assert [type(answer) for answer in peer.exchange(LeaseRequest(max_trajectories=4))] == [Bye]


def test_a_duplicate_is_refused_while_the_first_is_connected_and_welcomed_once_it_is_not(scene: RouterScene):
    first = FakePeer(scene, "generator", "g0", "1")
    (refusal,) = FakePeer(scene, "generator", "g0", "2").receive()
    assert isinstance(refusal, Refuse)
    first.channel.close()
    (welcome,) = FakePeer(scene, "generator", "g0", "3").receive()
    assert isinstance(welcome, Welcome)


def test_a_generator_that_misses_pings_is_reported_silent_until_it_answers(scene: RouterScene):
    learner, generator = FakePeer(scene, "learner", "learner"), FakePeer(scene, "generator", "g0")
    generator.exchange(Pong(0.0, "ready", 3))

    def reported() -> list[str]:
        members = [message for message in learner.receive() if isinstance(message, Members)]
        return [generator.state for message in members for generator in message.generators]

    assert reported()[-1:] == ["ready"]
    for _ in range(3):
        scene.tick(1.0)
    assert reported() == ["silent"], "reported once"
    generator.exchange(Pong(0.0, "ready", 3))
    assert reported() == ["ready"]
