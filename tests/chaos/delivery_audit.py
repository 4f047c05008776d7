"""Delivery audit: compare acknowledgments with accounted trajectories, using the journals of all processes.

Each rule compares two records that do not share the code under test: the acknowledgments that a generator received,
and the archive; the content before sending, and the input of the learner's step; leases granted, and leases released.
Rules that depend on time exclude what a strike explains.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.chaos.outcome import SLACK_S, Evidence, first_acks, genuine
from tests.chaos.state_audit import answered_are_never_handed_out, roll_backs_take_all_back
from tests.chaos.watched.journal import Entry, Life

_MAX_NAMED = 5
_SETTLED_S = 0.8
"""Time for the broker to write its backlog after the store returns. It reaps nothing for longer than that."""
_END_S = 0.5
"""Last part of a run in which an answer may still be on its way."""
_UNREAD_S = 0.25
"""Longest time between receiving prompts and reading them. If the loop ends in between, the Bye returns them."""


def find_delivery_problems(evidence: Evidence) -> list[str]:
    rules = (
        _acknowledged_is_accounted_for,
        _answers_fit_what_was_sent,
        _trained_is_what_was_sent,
        _offers_are_told_apart,
        _reported_at_once,
        _skipped_are_never_handed_out,
        answered_are_never_handed_out,
        _handed_out_again_for_a_reason,
        _lapsed_for_a_reason,
        _returned_are_not_departed,
        _drained_has_returned_all,
        _orders_come_from_the_learner,
        _stale_generators_get_no_prompts,
        _sent_under_verified_weights,
        _members_differ,
        roll_backs_take_all_back,
        _commits_are_fenced,
        _checkpoints_are_fenced,
        _claims_are_fenced_and_lapse_for_a_reason,
    )
    return [problem for rule in rules for problem in list(rule(evidence))[:_MAX_NAMED]]


def _sent(life: Life) -> dict[str, list[Entry]]:
    """Return all trajectories that a process recorded before sending, by id, including offered copies."""
    sent: dict[str, list[Entry]] = defaultdict(list)
    for entry in life.of("put", "offered"):
        sent[entry["id"]].append(entry)
    return sent


def _acknowledged_is_accounted_for(evidence: Evidence) -> Iterator[str]:
    first_sent: dict[tuple[str, str], float] = {}
    for life in evidence.generators:
        for entry in life.of("put", "offered"):
            copy = (entry["id"], entry["content"])
            first_sent[copy] = min(entry["t"], first_sent.get(copy, entry["t"]))
    for life in evidence.generators:
        puts, acks = genuine(life), first_acks(life)
        for trajectory_id, at in acks.items():
            if trajectory_id not in puts:
                continue
            stored = evidence.stored.get(trajectory_id)
            if stored is not None:
                if stored.content != puts[trajectory_id]["content"]:
                    yield f"{trajectory_id} was acknowledged to {life.role}, and stored with another content"
                continue
            # Superseded: the replacement existed earlier. This one was sent later, so the replacement is stored.
            group, _, rest = trajectory_id.partition("-")
            other = evidence.stored_at.get((group, int(rest.partition("-")[2])))
            if other is None or first_sent.get((other.id, other.content), float("inf")) >= at:
                there = f"in its place is {other.id}, sent later" if other else "nothing is in its place"
                yield f"{trajectory_id} was acknowledged to {life.role} and is not stored: {there}"
        for entry in life.of("put"):
            # An acknowledgment after offering an undamaged copy may belong to the copy.
            offers = (each["t"] for each in life.of("offered") if each["id"] == entry["id"])
            if entry["spoiled"] and acks.get(entry["id"], float("inf")) < min(offers, default=float("inf")):
                yield f"{entry['id']} arrived damaged and was acknowledged to {life.role}"


def _answers_fit_what_was_sent(evidence: Evidence) -> Iterator[str]:
    ends_at = evidence.harness.ended_at - _END_S
    for life in evidence.generators:
        sent, genuinely_sent, acks = _sent(life), genuine(life), first_acks(life)
        offered = {entry["id"] for entry in life.of("offered")}
        refused = [entry for entry in life.of("nacked") if entry["fatal"]]
        for trajectory_id in acks:
            if trajectory_id not in sent:
                yield f"{trajectory_id} was acknowledged to {life.role}, which never sent it"
        for entry in refused:
            if entry["id"] in genuinely_sent and entry["id"] not in offered:
                yield f"{entry['id']} of {life.role} was refused for good: {entry['reason']}"
        if evidence.successor_began_at(life) < float("inf") or life.of("bye"):
            continue
        answered = set(acks) | {entry["id"] for entry in refused}
        for entry in life.of("put"):
            if entry["id"] not in answered and entry["t"] < ends_at:
                yield f"{entry['id']} of {life.role} was never answered"


def _trained_is_what_was_sent(evidence: Evidence) -> Iterator[str]:
    sent = {
        (trajectory_id, each["content"])
        for life in evidence.generators
        for trajectory_id, entries in _sent(life).items()
        for each in entries
    }
    for trained in evidence.lineage:
        for trajectory_id, content in zip(trained.ids, trained.contents, strict=True):
            stored = evidence.stored.get(trajectory_id)
            if (trajectory_id, content) not in sent:
                yield f"step {trained.step} trained on {trajectory_id}, which nobody sent with that content"
            elif stored is None or stored.content != content:
                yield f"step {trained.step} trained on {trajectory_id}, and the archive has another or none"


def _offers_are_told_apart(evidence: Evidence) -> Iterator[str]:
    for life in evidence.generators:
        for offer in life.of("offered"):
            name, at = offer["id"], offer["t"]
            acked_at = next((e["t"] for e in life.of("acked") if name in e["ids"] and e["t"] > at), None)
            refused = next((e for e in life.of("nacked") if e["id"] == name and e["fatal"] and e["t"] > at), None)
            what = offer["what"]
            # The stored one may be the one whose name was taken.
            is_taken = what == "again" and refused is not None and refused["reason"].startswith("content_conflict")
            if what in ("same", "again") and refused and not is_taken:
                yield f"{name}, offered to tell apart ({what}), must be acknowledged, got {refused['reason']}"
            if what == "unknown" and acked_at:
                yield f"{name} of a group that does not exist was acknowledged"
            # The store can compare only until the step is committed or the group rejected; then the record may be gone.
            # It cannot compare at all if the first content was superseded.
            stored = evidence.stored.get(name)
            is_kept = stored is not None and stored.outcome == "retired"
            is_known = is_kept and (acked_at or 0) < evidence.first_commit_at(offer["group"])
            if what == "conflict" and acked_at and is_known:
                yield f"{name} with another content was acknowledged"


def _reported_at_once(evidence: Evidence) -> Iterator[str]:
    for life in [*evidence.generators, evidence.harness]:
        for entry in life.of("overrun", "overdue", "overadmitted"):
            facts = {name: value for name, value in entry.items() if name not in ("t", "k")}
            yield f"{life.role} found {entry['k']}: {facts}"


def _skipped_are_never_handed_out(evidence: Evidence) -> Iterator[str]:
    for broker in evidence.brokers:
        for entry in broker.of("leased"):
            for lease in entry["leases"]:
                if lease.partition("-")[0] in evidence.skipped:
                    yield f"{lease} was handed out to {entry['owner']}, though no group of it is stored: it was skipped"


def _handed_out_again_for_a_reason(evidence: Evidence) -> Iterator[str]:
    released: dict[str, float] = {}
    departed: dict[str, float] = {}
    holders: dict[str, str] = {}
    lives = {evidence.owner(life): life for life in evidence.generators}

    def release(lease: str, at: float) -> None:
        released[lease] = min(at, released.get(lease, at))

    for life in evidence.generators:
        for entry in life.of("returned", "lied"):
            for lease in entry["leases"]:
                # A false return counts only if the liar itself sent it.
                owner = evidence.owner(life) if entry["k"] == "lied" else ""
                release(f"{lease} {owner}".strip(), entry["t"])
    events = sorted((e for b in evidence.brokers for e in b.of("leased", "lapsed", "departed", "undeliverable")),
                    key=lambda e: e["t"])  # fmt: skip
    for entry in events:
        at = entry["t"]
        match entry["k"]:
            case "lapsed" | "undeliverable":
                for lease in entry["leases"]:
                    release(lease if entry["k"] == "undeliverable" else lease[0], at)
            case "departed":
                departed[entry["owner"]] = at
            case "leased":
                for lease in entry["leases"]:
                    group, _, attempt = lease.partition("-")
                    before = f"{group}-{int(attempt) - 1}"
                    holder = holders.get(before, "")
                    # Released by an authorized peer, or by a false report that concerned the liar's own lease.
                    is_released = any(released.get(by, float("inf")) <= at for by in (before, f"{before} {holder}"))
                    is_alive = holder in lives and evidence.successor_began_at(lives[holder]) > at
                    if int(attempt) and is_alive and not is_released and departed.get(holder, float("inf")) > at:
                        yield f"{lease} was handed out, though {holder} still held {before}"
                    holders[lease] = entry["owner"]


def _lapsed_for_a_reason(evidence: Evidence) -> Iterator[str]:
    lives = {evidence.owner(life): life for life in evidence.generators}
    for broker in evidence.brokers:
        for entry in broker.of("lapsed"):
            for lease, owner in entry["leases"]:
                if owner in lives and (why := _why_needless(evidence, broker, lives[owner], lease, at=entry["t"])):
                    yield f"{lease} of {owner} lapsed, {why}"


def _why_needless(evidence: Evidence, broker: Life, holder: Life, lease: str, *, at: float) -> str:
    window = evidence.times.lease_s + SLACK_S
    if (gone_at := evidence.successor_began_at(holder)) > at:
        received = any(lease in dict(map(tuple, entry["leases"])) for entry in holder.of("prompts"))
        roles = (holder.role, "broker", "store")
        # Other generators use a relay that loses data when it cuts connections.
        is_direct = holder.role == "generator-0" and not holder.of("bye")
        is_quiet = evidence.is_quiet(roles, since=at - window, until=at)
        return "though its holder was there all the time" if received and is_direct and is_quiet else ""
    successor = next(life for life in evidence.generators if life.role == holder.role and life.began_at == gone_at)
    welcomed = [entry["t"] for entry in successor.of("welcome")]
    was_known = any(entry["owner"] == evidence.owner(holder) for entry in broker.of("leased"))
    # The broker takes back the leases of the previous process before it welcomes the next one.
    is_late = bool(welcomed) and welcomed[0] < at
    is_quiet = is_late and evidence.is_quiet(("store",), since=max(welcomed[0], at - _SETTLED_S) + SLACK_S, until=at)
    return "though its holder's successor had been welcomed by the same broker" if was_known and is_quiet else ""


def _returned_are_not_departed(evidence: Evidence) -> Iterator[str]:
    lives = {evidence.owner(life): life for life in evidence.generators}
    for broker in evidence.brokers:
        for entry in broker.of("departed"):
            life = lives.get(entry["owner"])
            if life is None or not entry["reason"].startswith("silent"):
                continue
            welcomes = [each["t"] for each in life.of("welcome") if each["t"] < entry["t"]]
            leaves = [each["t"] for each in life.of("unknown_here", "reconnected") if each["t"] < entry["t"]]
            was_back = welcomes and max(welcomes) > max(leaves, default=0.0)
            # Too little time has passed for a timeout.
            if was_back and entry["t"] - max(welcomes) < evidence.times.peer_timeout_s and len(welcomes) > 1:
                yield f"the leases of {entry['owner']} were taken back as those of a silent peer, after its return"


def _drained_has_returned_all(evidence: Evidence) -> Iterator[str]:
    for life in evidence.generators:
        if not any(not entry["reason"] for entry in life.of("bye")):
            continue
        left_at = min((entry["t"] for entry in life.of("left")), default=float("inf"))
        answers = Counter(entry["lease"] for entry in life.of("put"))
        returned = {lease for entry in life.of("returned") for lease in entry["leases"]}
        for entry in life.of("prompts"):
            if entry["t"] > left_at - _UNREAD_S:
                continue
            for lease, members in entry["leases"]:
                if answers[lease] < members and lease not in returned:
                    yield f"{life.role} was drained with {lease} neither answered nor returned"


def _orders_come_from_the_learner(evidence: Evidence) -> Iterator[str]:
    given = evidence.of_learners("ordered")
    ordered = {(entry["order"], member) for entry in given for member in entry["members"]}
    answered = {entry["answer"] for life in evidence.generators for entry in life.of("answered")}
    for life in evidence.generators:
        for entry in life.of("order"):
            if (entry["order"], entry["member"]) not in ordered:
                yield f"{life.role} got the order {entry['order']}, which no learner gave to an epoch with it"
    for entry in evidence.of_learners("heard"):
        if entry["answer"] not in answered:
            yield f"the learner heard {entry['answer']}, which that generator never said"


def _stale_generators_get_no_prompts(evidence: Evidence) -> Iterator[str]:
    versions = [(e["t"], e["version"]) for e in evidence.of_learners("version", "rolling_back", "rolled_back")]
    # Prompts may reach a loaded or stopped generator long after they were leased, and after its next request.
    leased_at = {lease: e["t"] for broker in evidence.brokers for e in broker.of("leased") for lease in e["leases"]}
    for life in evidence.generators:
        for entry in life.of("prompts"):
            if not entry["leases"]:
                continue
            until = min(leased_at.get(lease, entry["t"]) for lease, _ in entry["leases"])
            asked_at = max((each["t"] for each in life.of("asked") if each["t"] <= until), default=life.began_at)
            newest = max((each["version"] for each in life.of("pong") if each["t"] <= until), default=-1)
            before = [version for at, version in versions if at <= asked_at][-1:]
            between = [version for at, version in versions if asked_at < at <= until]
            committed = min([*before, *between], default=0)
            if 0 <= newest < committed - evidence.max_lag:
                yield f"{life.role} got prompts with weights of version {newest}, {committed} was committed"


def _sent_under_verified_weights(evidence: Evidence) -> Iterator[str]:
    for life in evidence.generators:
        for entry in life.of("put"):
            # After a failed transfer the engine still has the previous, verified weights.
            allowed = ("ready", "draining", "unsynced") if entry.get("verified") else ("ready", "draining")
            if entry["state"] not in allowed:
                yield f"{entry['id']} left {life.role} while it was {entry['state']}"


def _members_differ(evidence: Evidence) -> Iterator[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for each in evidence.stored.values():
        groups[each.sample[0]].append(each.tokens)
    for group, tokens in groups.items():
        if len(tokens) > 1 and len(set(tokens)) == 1:
            yield f"all members of group {group} have the same tokens"


def _rolled_back_between(evidence: Evidence, life: Life, since: float, until: float, *, kind: str) -> bool:
    """Whether another learner rolled back in that time; `kind`: begun (rolling_back) or done (rolled_back)."""
    others = (other for other in evidence.learners if other is not life)
    return any(since < entry["t"] < until for other in others for entry in other.of(kind))


def _claim_lapsed_between(evidence: Evidence, step: int, since: float, until: float) -> bool:
    lapses = (entry for broker in evidence.brokers for entry in broker.of("claims_lapsed"))
    return any(step in entry["steps"] and since < entry["t"] < until for entry in lapses)


def _claimed_by_another_between(evidence: Evidence, life: Life, step: int, since: float, until: float) -> bool:
    """Whether another learner claimed it; a replaced learner may claim again before it notices."""
    claims = (each for other in evidence.learners if other is not life for each in other.of("claimed"))
    return any(each["step"] == step and since < each["t"] < until for each in claims)


def _commits_are_fenced(evidence: Evidence) -> Iterator[str]:
    for life in evidence.learners:
        claimed_at = {entry["fence"]: entry["t"] for entry in life.of("claimed")}
        begun_at = life.began_at
        refusals = ("commit_refused", "recommit_refused", "reclaim_refused")
        for entry in life.of("recommitting", "renewing", "recommitted", "renewed", *refusals):
            at, kind, step = entry["t"], entry["k"], entry["step"]
            since = claimed_at.get(entry.get("fence", -1), life.began_at)
            if kind in ("recommitting", "renewing"):
                begun_at = at
            elif kind == "recommitted" and _rolled_back_between(evidence, life, since, begun_at, kind="rolled_back"):
                yield f"a repeat of the commit of step {step} was accepted after a roll back"
            elif kind == "renewed" and _claim_lapsed_between(evidence, step, since, begun_at):
                yield f"the claim of step {step} was renewed after it had lapsed"
            elif kind in refusals:
                is_explained = _claimed_by_another_between(evidence, life, step, since, at)
                is_explained |= _rolled_back_between(evidence, life, since, at, kind="rolling_back")
                is_explained |= kind != "recommit_refused" and _claim_lapsed_between(evidence, step, since, at)
                is_store_away = not evidence.is_quiet(("store",), since=at - 1.0, until=at)
                is_explained |= is_store_away and kind == "reclaim_refused"
                if not is_explained:
                    yield f"{kind} of step {step}, though nothing came between: {entry['error']}"


def _checkpoints_are_fenced(evidence: Evidence) -> Iterator[str]:
    for life in evidence.learners:
        begun_at = 0.0
        for entry in life.of("pointing", "pointed", "pointer_refused"):
            at, step = entry["t"], entry["step"]
            if entry["k"] == "pointing":
                begun_at = at
            elif entry["k"] == "pointed":
                if _rolled_back_between(evidence, life, life.began_at, begun_at, kind="rolled_back"):
                    yield f"the checkpoint of step {step} of a learner that was replaced was accepted"
            elif not _rolled_back_between(evidence, life, life.began_at, at, kind="rolling_back"):
                yield f"the checkpoint of step {step} was refused: {entry['error']}"


def _claims_are_fenced_and_lapse_for_a_reason(evidence: Evidence) -> Iterator[str]:
    for fence, times in Counter(entry["fence"] for entry in evidence.of_learners("claimed")).items():
        if times > 1:
            yield f"{times} claims have the fence {fence}"
    for broker in evidence.brokers:
        for entry in broker.of("claims_lapsed"):
            since = entry["t"] - evidence.times.lease_s - SLACK_S
            if evidence.is_quiet(("learner", "broker", "store"), since=since, until=entry["t"]):
                yield f"the claims of the steps {entry['steps']} lapsed, though their learner was there all the time"
