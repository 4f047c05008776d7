"""DeadEndCause: why a wait of the learner will not end by itself, in a sentence, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.buffer.sampling import FLAWS
from slipstream.configs.run import RunConfig
from slipstream.learner.stall.progress import Arrivals, GeneratorProgress, RunProgress

_MOST_NAMED = 3
_SEE_WHY = "see why in their logs and among the events"


@dataclass(frozen=True, slots=True)
class DeadEndCause:
    """One. Example: DeadEndCause("generators", "no generator is alive ...", "start one with ...")."""

    kind: str
    """broker, generators, start, weights, adoption, rewards, filtered, lost, refused, store, silence, slow."""
    what: str
    """What is wrong."""
    remedy: str
    """What to do."""


def standstill(look: RunProgress, run: RunConfig, *, arrivals: Arrivals, num_failed: int) -> DeadEndCause:
    """Why nothing has helped for `arrivals.idle_s`: the first of the reasons below that holds, nearest to the root."""
    return (
        _no_broker(look)
        or _no_generator(look, run, idle_s=arrivals.idle_s)
        or _no_weights(look, idle_s=arrivals.idle_s)
        or _not_adopted(look)
        or (failing_rewards(run, num_failed=num_failed) if num_failed else None)
        or (_all_filtered(arrivals) if look.answered is None else None)
        or (_all_lost(arrivals) if look.answered is None else None)
        or _all_refused(arrivals)
        or _store_is_full(look)
        or _silence(look, idle_s=arrivals.idle_s)
    )


def failing_rewards(run: RunConfig, *, num_failed: int) -> DeadEndCause:
    """All of them, one after the other."""
    reward = run.generators.reward
    return DeadEndCause(
        "rewards",
        f"none of the last {num_failed} trajectories has a reward, every call of {reward.function} failed or took "
        f"longer than {reward.timeout_s:g} s",
        "mend that function or what it asks, or raise generators.reward.timeout_s",
    )


def laggards(look: RunProgress, *, lag_s: float) -> DeadEndCause:
    """Training goes on, but nobody adopts what comes of it."""
    return DeadEndCause(
        "adoption",
        f"for {lag_s:.0f} s no living generator has adopted newer weights, though the learner is at version "
        f"{look.announced_version} ({_told(look.living)})",
        _SEE_WHY,
    )


def slowness(*, waited_s: float, accepted: int, setting: str) -> DeadEndCause:
    """Something comes, but not enough of it."""
    return DeadEndCause(
        "slow",
        f"after {waited_s:.0f} s it is not complete, {accepted} trajectories to train on came meanwhile",
        f"start more generators, or raise {setting}",
    )


# --- why nothing helps -----------------------------------------------------------------------------------------------
def _no_broker(look: RunProgress) -> DeadEndCause | None:
    broker = look.broker
    if broker is not None and broker.is_alive:
        return None
    since = f"has been silent for {broker.report_age_s:.0f} s" if broker else "has never reported"
    return DeadEndCause(
        "broker", f"the broker {since}", "start it with `python -m broker` and the settings of this run"
    )


def _no_generator(look: RunProgress, run: RunConfig, *, idle_s: float) -> DeadEndCause | None:
    if look.living:
        return None
    told = _told(look.generators) or "none ever joined"
    return DeadEndCause(
        "generators",
        f"no generator is alive, and nothing has come for {idle_s:.0f} s ({told})",
        f"start one with `python -m generators broker.address={run.broker.address}`",
    )


def _no_weights(look: RunProgress, *, idle_s: float) -> DeadEndCause | None:
    if look.holding:
        return None
    is_only = len(look.living) == 1
    if all(generator.status.state == "starting" for generator in look.living):
        kind, got = "start", "has not got beyond its start" if is_only else "has got beyond its start"
    else:
        kind, got = "weights", "does not hold verified weights" if is_only else "holds verified weights"
    who = "the only living generator" if is_only else f"none of the {len(look.living)} living generators"
    return DeadEndCause(kind, f"{who} {got} after {idle_s:.0f} s ({_told(look.living)})", _SEE_WHY)


def _not_adopted(look: RunProgress) -> DeadEndCause | None:
    if any(generator.status.version == look.announced_version for generator in look.holding):
        return None
    return DeadEndCause(
        "adoption",
        f"no living generator has adopted version {look.announced_version} ({_told(look.living)})",
        _SEE_WHY,
    )


def _all_filtered(arrivals: Arrivals) -> DeadEndCause | None:
    reasons = {f"rejected: {flaw}" for flaw in FLAWS}
    if not arrivals.lost or not reasons.issuperset(arrivals.lost):
        return None
    return DeadEndCause(
        "filtered",
        f"buffer.filter rejected every group that came for {arrivals.idle_s:.0f} s ({_tally(arrivals.lost)})",
        "train on prompts that the model answers neither always nor never, raise generators.group_size, or loosen "
        "buffer.filter in another run",
    )


def _all_lost(arrivals: Arrivals) -> DeadEndCause | None:
    if not arrivals.lost:
        return None
    return DeadEndCause(
        "lost",
        f"every group that came was let go again for {arrivals.idle_s:.0f} s ({_tally(arrivals.lost)})",
        "make generators faster, or loosen in another run what lets groups go (buffer.staleness, "
        "buffer.group_deadline, buffer.max_attempts)",
    )


def _all_refused(arrivals: Arrivals) -> DeadEndCause | None:
    if not arrivals.refused:
        return None
    return DeadEndCause(
        "refused",
        f"the broker has refused what came for {arrivals.idle_s:.0f} s ({_tally(arrivals.refused)})",
        "generators and broker must be of one version; look into the broker's log",
    )


def _store_is_full(look: RunProgress) -> DeadEndCause | None:
    put_off = look.broker.reason if look.broker and look.broker.waits_for == "store" else ""
    if not (reason := look.capacity_reason or put_off):
        return None
    return DeadEndCause(
        "store", f"the store takes nothing more ({reason})", "make room, or raise the limit that this names"
    )


def _silence(look: RunProgress, *, idle_s: float) -> DeadEndCause:
    return DeadEndCause(
        "silence",
        f"nothing has come for {idle_s:.0f} s from generators that hold verified weights ({_told(look.holding)})",
        "look into their logs, or raise learner.dead_end.after_s when one trajectory may take as long",
    )


# --- words -----------------------------------------------------------------------------------------------------------
def _told(generators: Iterable[GeneratorProgress]) -> str:
    """How they are; the newest reports first."""
    by_age = sorted(generators, key=lambda generator: generator.status.report_age_s)
    more = [f"and {len(by_age) - _MOST_NAMED} more"] if len(by_age) > _MOST_NAMED else []
    return ", ".join([*map(_how_it_is, by_age[:_MOST_NAMED]), *more])


def _how_it_is(generator: GeneratorProgress) -> str:
    status = generator.status
    reason = f": {status.reason}" if status.reason else ""
    if not status.is_alive:
        word = "gone" if status.liveness == "gone" else "silent"
        return f"{status.name} has been {word} for {status.report_age_s:.0f} s{reason}"
    holds = "no weights" if status.version is None else f"version {status.version}"
    busy = f", {status.running} trajectories under way" if status.running else ""
    return f"{status.name} is {status.state} with {holds}{busy}{reason}"


def _tally(counts: dict[str, int]) -> str:
    largest_first = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count} {name}" for name, count in largest_first[:_MOST_NAMED])
