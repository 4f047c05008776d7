"""Guests may answer only their own leases; their answers are checked, and liars are quarantined."""

from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from slipstream.broker.guests import convict
from slipstream.broker.messages import (
    Ack,
    Audit,
    Audited,
    Bye,
    Drain,
    LeaseRequest,
    LenderError,
    Member,
    Nack,
    Pong,
    Prompt,
    Put,
    Refuse,
    UpdateApplied,
)
from slipstream.buffer.codec import unpack
from slipstream.buffer.trajectory import AnswerCheck, Reward, Sampling, VersionSpan
from tests.builders import make_packed
from tests.cases import cases
from tests.fakes import FakePeer, RouterScene

READY = Pong(-1.0, "ready", 0)
SETTINGS = {"cluster": {"untrusted_generators": {"names": ["alice", "mallory"], "audit_fraction": 1.0}}}
LIE = "its reward is another"


class GuestPeer(FakePeer):
    """A generator with the key of a guest."""

    def __init__(self, scene: RouterScene, name: str, *, role: str = "generator", key: str = "") -> None:
        client = scene.hub.client
        scene.hub.client = lambda: client(guest=key or name)  # type: ignore[method-assign]
        super().__init__(scene, role, name)
        scene.hub.client = client  # type: ignore[method-assign]


@pytest.fixture
def scene(tmp_path: Path) -> RouterScene:
    return RouterScene(tmp_path, settings=SETTINGS, staleness={"max_lag": 4})


def own(scene: RouterScene, name: str = "g0") -> FakePeer:
    peer = FakePeer(scene, "generator", name)
    peer.exchange(READY)
    return peer


def join(scene: RouterScene, name: str = "mallory") -> GuestPeer:
    guest = GuestPeer(scene, name)
    guest.exchange(READY)
    return guest


def answer(prompt: Prompt, index: int, *, guest: str = "mallory", **overrides: object):
    fields = {"prompt_uid": prompt.uid, "generator_id": guest, "attempt": prompt.lease.attempt}
    fields |= {"sampling": Sampling(1.0, 1.0, -1, 16, seed=index), "data_source": "test"}
    return make_packed(prompt.lease.group_id, index, **(fields | overrides))  # type: ignore[arg-type]


def put(peer: FakePeer, *packed) -> list:
    return peer.exchange(Put([header for header, _ in packed]), *(payload for _, payload in packed))


def ordered(peer: FakePeer) -> list[Audit]:
    return [message for message in peer.receive() if isinstance(message, Audit)]


def give_answers(scene: RouterScene, guest: FakePeer, name: str = "mallory") -> list[Prompt]:
    """The guest answers two groups of two; returns their prompts."""
    prompts = guest.lease().prompts
    for prompt in prompts:
        (ack,) = put(guest, *(answer(prompt, index, guest=name) for index in prompt.lease.indices))
        assert isinstance(ack, Ack), ack
    scene.step()
    return prompts


def test_a_guest_gets_training_prompts_once_one_of_ones_own_can_check_it_and_no_evaluations(scene: RouterScene):
    guest = join(scene)
    assert guest.exchange(LeaseRequest(4)) == []
    scene.tick(1.0)
    (empty,) = guest.receive()
    assert empty.prompts == []
    assert empty.reason == "guests: no trusted generator is ready to check answers"
    scene.store.open_evaluation("e", purpose="sampled", version=0, rows=[0, 1])
    owned = own(scene)
    assert {prompt.lease.purpose for prompt in guest.lease().prompts} == {"train"}
    assert "sampled" in {prompt.lease.purpose for prompt in owned.lease().prompts}


def test_answers_of_a_guest_are_checked_by_ones_own_and_never_by_guests(scene: RouterScene):
    first, second, guest, other = own(scene), own(scene, "g1"), join(scene), join(scene, "alice")
    (prompt, _) = give_answers(scene, guest)
    orders = [*ordered(first), *ordered(second)]
    assert len(orders) == 4
    assert orders[0].prompt == prompt
    assert ordered(guest) == ordered(other) == []
    other.exchange(Audited(AnswerCheck("0-0-0", lie=LIE)))
    other.exchange(Audited(AnswerCheck("0-0-1", lie=LIE)))
    assert scene.store.quarantined_guests() == {}


def test_a_liar_is_quarantined_with_its_groups_drained_and_may_not_come_back(scene: RouterScene):
    owned, guest, honest = own(scene), join(scene), join(scene, "alice")
    give_answers(scene, guest)
    scene.store.commit_version(1)
    owned.receive()
    owned.exchange(Audited(AnswerCheck("0-0-0", lie=LIE)))
    assert scene.store.counts().ready == 2
    owned.exchange(Audited(AnswerCheck("0-0-1", lie=LIE)))
    assert scene.store.counts().ready == 0
    assert scene.store.counts().reasons == {"quarantined: guest: mallory": 2}
    sentence = f"2 of 2 checked answers are false, the last one: {LIE}"
    assert scene.store.quarantined_guests() == {"mallory": sentence}
    drain = next(message for message in guest.receive() if isinstance(message, Drain))
    assert drain.reason == f"quarantined: {sentence}"
    role = scene.store.roles()["mallory"]
    assert (role["state"], role["reason"]) == ("gone", f"quarantined: {sentence}")
    told = [f"quarantined, with the 2 groups it contributed to: {sentence}"]
    told += [f"quarantined: {sentence}; 0 leases returned"]
    assert [text for role, text in scene.events() if role == "mallory"] == told
    assert guest.exchange(LeaseRequest(4)) == [Bye()]
    (refusal,) = GuestPeer(scene, "mallory").receive()
    assert isinstance(refusal, Refuse)
    assert refusal.reason == f"guest 'mallory' is quarantined and may not join again: {sentence}"
    assert len(honest.lease().prompts) == 2
    assert scene.store.audit().is_sound


def test_a_check_counts_once_and_only_from_whoever_was_ordered(scene: RouterScene):
    first, second, guest = own(scene), own(scene, "g1"), join(scene)
    give_answers(scene, guest)
    lies = {peer: [unpack(order.payload).id for order in ordered(peer)] for peer in (first, second)}
    own_lie, *others = lies[first]
    for name in (*others, *others, *lies[second]):
        (second if name in others else first).exchange(Audited(AnswerCheck(name, lie=LIE)))
    first.exchange(Audited(AnswerCheck(own_lie, lie=LIE)))
    first.exchange(Audited(AnswerCheck(own_lie, lie=LIE)))
    assert scene.store.quarantined_guests() == {}


def test_checks_of_a_generator_that_leaves_or_says_nothing_go_to_another(scene: RouterScene):
    first, guest = own(scene), join(scene)
    give_answers(scene, guest)
    assert len(ordered(first)) == 4
    second = own(scene, "g1")
    first.exchange(Bye())
    scene.step()
    assert len(ordered(second)) == 4
    scene.clock.now += 7.0
    second.exchange(READY)
    scene.clock.now += 7.0
    assert ordered(second) == []


@pytest.mark.parametrize(("logprob", "is_lie"), [(-20.0, True), (-3.0, False)])
def test_an_answer_that_repeats_an_improbable_one_is_a_lie(scene: RouterScene, logprob: float, is_lie: bool):
    owned, guest = own(scene), join(scene)
    give_answers(scene, guest)
    for name in ("0-0-0", "0-0-1", "1-0-0", "1-0-1"):
        owned.exchange(Audited(AnswerCheck(name, digest="a", logprob=logprob)))
    found = scene.store.quarantined_guests()
    assert list(found) == ["mallory"] * is_lie
    assert all(reason.endswith("1-0-1 repeats 1-0-0, which is no coincidence") for reason in found.values())


def test_a_guest_whose_answers_wait_for_checks_gets_no_more_leases(tmp_path: Path):
    settings = SETTINGS | {"generators": {"group_size": 32}, "learner": {"prompts_per_step": 2}}
    scene = RouterScene(tmp_path, settings=settings, staleness={"max_lag": 9})
    own(scene)
    guest = join(scene)
    prompts = guest.lease(max_trajectories=64).prompts
    for prompt in prompts:
        put(guest, *(answer(prompt, index, group_size=32) for index in prompt.lease.indices))
    guest.exchange(LeaseRequest(64))
    scene.tick(1.0)
    assert guest.receive()[-1].reason == "guests: 64 of its answers wait for a check"


FALSE = {
    "another group": {"group": "5"},
    "an attempt of before": {"attempt": 1},
    "another's name": {"generator_id": "g0"},
    "another row": {"prompt_uid": "test/9"},
    "another source": {"data_source": "other"},
    "another temperature": {"sampling": Sampling(0.5, 1.0, -1, 16, seed=0)},
    "rewards of turns": {"reward": Reward(total=1.0, turns=[0.5, 0.5])},
    "contexts": {"context_starts": [8]},
}


@pytest.mark.parametrize("name", FALSE)
def test_what_a_lease_does_not_ask_for_is_refused(scene: RouterScene, name: str):
    own(scene)
    guest = join(scene)
    (prompt, *_) = guest.lease().prompts
    fields = dict(FALSE[name])
    if group := fields.pop("group", ""):
        fields |= {"group_id": group}
    header, payload = make_packed(group, 0, generator_id="mallory") if group else answer(prompt, 0, **fields)
    answers = put(guest, (header, payload))
    assert [type(each) for each in answers] == [Nack]
    assert answers[0].is_fatal
    assert scene.store.counts().accepted == 0
    assert sum(scene.store.counts().refused.values()) == 1


def test_a_guest_answers_its_own_leases_and_is_its_own_generator_and_nothing_else(scene: RouterScene):
    owned, guest = own(scene), join(scene)
    (prompt, *_) = owned.lease().prompts
    (nack,) = put(guest, answer(prompt, 0))
    assert nack.reason.startswith("guest_lease: guest 'mallory' must answer its own leases")
    for peer in (GuestPeer(scene, "learner", role="learner", key="alice"), GuestPeer(scene, "g7", key="alice")):
        (refusal,) = peer.receive()
        assert isinstance(refusal, Refuse)
        assert refusal.reason.startswith("a guest must be a generator named 'alice', got")


def test_a_guest_fetches_deltas_and_its_word_of_lenders_counts_for_nothing(scene: RouterScene):
    learner = FakePeer(scene, "learner", "learner")
    own(scene)
    guest = join(scene)
    members = learner.receive()[-1]
    assert [each.transport for each in members.generators] == ["collective", "delta"]
    accused = [LenderError("tcp://10.0.0.1:1", "altered", is_altered=True)]
    guest.exchange(UpdateApplied(0, 1, Member("mallory", "1"), lender_errors=accused))
    (relayed,) = [message for message in learner.receive() if isinstance(message, UpdateApplied)]
    assert relayed.lender_errors == []


def test_a_guest_that_another_broker_has_quarantined_ends_here_with_its_next_answer(scene: RouterScene):
    own(scene)
    guest = join(scene)
    (prompt, *_) = guest.lease().prompts
    scene.store.quarantine_guest("mallory", reason="lies")
    answers = put(guest, answer(prompt, 0, version_spans=[VersionSpan(6, 0)]))
    assert "guest_quarantined" in [each.reason for each in answers if isinstance(each, Nack)]
    assert any(isinstance(each, Drain) for each in answers)
    assert scene.store.quarantined_guests() == {"mallory": "lies"}


HONEST = AnswerCheck("0-0-0", num_tokens=100, logprob_diff=1.0, own_logprob_diff=0.01, surplus=2.0, variance=20.0)


changed = partial(structs.replace, HONEST)


LIE_ABOUT_A_REWARD = changed(lie="7-0-1 has a reward of 1, and 0 by one's own reward function")
FEW_TOKENS = changed(num_tokens=4, logprob_diff=0.0, surplus=-1.0, variance=1.0)


@cases(
    "checks, reason",
    ([], ""),
    ([HONEST] * 64, ""),
    # One lie may be a fault, and two convict.
    ([LIE_ABOUT_A_REWARD, *[HONEST] * 9], ""),
    (
        [LIE_ABOUT_A_REWARD, *[HONEST] * 9, LIE_ABOUT_A_REWARD],
        "2 of 11 checked answers are false, the last one: 7-0-1 has a reward of 1, and 0 by one's own reward",
    ),
    # Log probabilities beyond the bound convict once four answers were scored.
    ([changed(logprob_diff=30.0)] * 3 + [AnswerCheck("0-0-1")] * 9, ""),
    ([changed(logprob_diff=30.0)] * 4, "within 0.05 nats on average, got 0.3 over 400 tokens of 4 answers"),
    # The policy's change since is allowed for by its effect on trusted answers.
    ([changed(logprob_diff=10.0, own_logprob_diff=0.0)] * 4, "nats"),
    ([changed(logprob_diff=10.0, own_logprob_diff=0.04)] * 4, ""),
    # Answers that the policy would not sample.
    ([changed(surplus=30.0)] * 4, "the likeliest token 30% more often"),
    ([changed(surplus=-30.0)] * 4, "the likeliest token 30% less often"),
    # Chance is allowed for where few tokens were scored.
    ([FEW_TOKENS] * 4, ""),
    ([FEW_TOKENS] * 64, "the likeliest token"),
    ([changed(logprob_diff=float("nan"))] * 4, "nats"),
    ([changed(surplus=float("nan"))] * 4, "the likeliest token"),
)
def test_the_checks_convict_a_dishonest_guest_and_no_honest_one(checks: list[AnswerCheck], reason: str):
    found = convict(checks)
    assert bool(found) == bool(reason)
    assert reason in found
