"""Causes of a stall: checks that tell why a wait of the learner will not end by itself.

Each check is a function `Progress -> StallCause | None`. Root causes come first: a dead broker makes every generator
look silent, and a generator without weights sends nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.broker.status.role_status import RoleStatus
from slipstream.buffer.accounting import REJECTION_REASONS
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.stall.progress import Progress

Kind = Literal[
    "broker", "generators", "start", "weights", "outdated", "rewards", "filtered", "lost", "refused", "store",
    "silence", "slow",
]  # fmt: skip

_MOST_NAMED = 3
_SEE_LOGS = "their logs and the events have the reason"


@dataclass(frozen=True, slots=True)
class StallCause:
    """Example: StallCause("generators", "no generator is alive ...", "start one with ...")."""

    kind: Kind
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


def find_cause(progress: Progress) -> StallCause | None:
    """First check that holds among those whose deadline has passed; None while the wait may still end by itself."""
    run, limits = progress.run, progress.run.learner.dead_end
    checks: list[Callable[[Progress], StallCause | None]] = []
    # A replay trains on stored rewards.
    if progress.rewards_have_failed and run.mode != "replay":
        checks.append(_rewards_failed)
    if progress.outdated_s >= limits.start_after_s:
        checks.append(_weights_outdated)
    if progress.idle_s >= _max_idle_s(progress):
        checks += [
            _broker_dead, _generators_dead, _weights_missing, _weights_outdated, _rewards_failed, _groups_lost,
            _frames_refused, _store_full, _generators_silent,
        ]  # fmt: skip
    if progress.served_s >= progress.limit_s:
        checks.append(_too_slow)
    return next(filter(None, (check(progress) for check in checks)), None)


def _max_idle_s(progress: Progress) -> float:
    """Longest time without progress; loading a model and fetching weights take longer than anything else."""
    limits, engine, living = progress.run.learner.dead_end, progress.run.generators.engine, progress.now.living
    longest = [limits.after_s]
    if any(each.state == "starting" or each.waits_for == "transfer" for each in living):
        longest.append(limits.start_after_s)
    if any(each.state == "starting" for each in living) and isinstance(engine, VllmEngineConfig):
        # A start that takes too long ends by itself, and its generator knows why; the process needs some time before.
        longest.append(engine.start_timeout_s + limits.after_s)
    return max(longest)


def _broker_dead(progress: Progress) -> StallCause | None:
    broker = progress.now.broker
    if broker and broker.is_alive:
        return None
    since = f"has been silent for {broker.report_age_s:.0f} s" if broker else "has never reported"
    return StallCause("broker", f"the broker {since}", "start it with `python -m broker` and the settings of this run")


def _generators_dead(progress: Progress) -> StallCause | None:
    if progress.now.living:
        return None
    known = _describe(progress.now.generators) or "none ever joined"
    problem = f"no generator is alive, and nothing has come for {progress.idle_s:.0f} s ({known})"
    run = progress.run
    where = f"name={run.name}" if run.runs_dir == "runs" else f"name={run.name} runs_dir={run.runs_dir}"
    return StallCause("generators", problem, f"start one with `python -m generators {where}`")


def _weights_missing(progress: Progress) -> StallCause | None:
    if progress.now.synced:
        return None
    is_starting = all(each.state == "starting" for each in progress.now.living)
    missing = "has finished its start" if is_starting else "holds verified weights"
    problem = f"no living generator {missing} after {progress.idle_s:.0f} s ({_describe(progress.now.living)})"
    return StallCause("start" if is_starting else "weights", problem, _SEE_LOGS)


def _weights_outdated(progress: Progress) -> StallCause | None:
    version = progress.now.announced_version
    if any(generator.version == version for generator in progress.now.synced):
        return None
    problem = f"no living generator has applied version {version} ({_describe(progress.now.living)})"
    return StallCause("outdated", problem, _SEE_LOGS)


def _rewards_failed(progress: Progress) -> StallCause | None:
    return no_reward(progress.run, num_failed=progress.failed_rewards) if progress.failed_rewards else None


def no_reward(run: RunConfig, *, num_failed: int) -> StallCause:
    """The cause when the last `num_failed` trajectories have no reward."""
    called = f"every call of {run.generators.reward.summary} failed or timed out"
    problem = f"none of the last {num_failed} trajectories has a reward, {called}"
    timeout_s = run.generators.reward.timeout_s
    return StallCause("rewards", problem, f"repair it, or raise generators.reward.timeout_s ({timeout_s:g} s)")


def _groups_lost(progress: Progress) -> StallCause | None:
    # Lost groups do not delay an evaluation.
    if not progress.losses or progress.now.answered is not None:
        return None
    lost = f"every group that came for {progress.idle_s:.0f} s ({_count(progress.losses)})"
    if set(progress.losses) <= {f"rejected: {flaw}" for flaw in REJECTION_REASONS}:
        remedy = (
            "start a new run with easier or harder prompts, a larger generators.group_size, or a looser buffer.filter"
        )
        return StallCause("filtered", f"buffer.filter rejected {lost}", remedy)
    remedy = "speed up generators, or loosen buffer.staleness, group_deadline or max_attempts in a new run"
    generators = _describe(progress.now.living)
    return StallCause("lost", f"the buffer dropped {lost}{generators and f' ({generators})'}", remedy)


def _frames_refused(progress: Progress) -> StallCause | None:
    if not progress.refused:
        return None
    problem = f"the broker has refused what came for {progress.idle_s:.0f} s ({_count(progress.refused)})"
    return StallCause("refused", problem, "run generators and broker from one version; the broker's log has details")


def _store_full(progress: Progress) -> StallCause | None:
    broker = progress.now.broker
    deferred = broker.reason if broker and broker.waits_for == "store" else ""
    if not (reason := progress.now.capacity_reason or deferred):
        return None
    return StallCause(
        "store", f"the store accepts nothing more ({reason})", "make room, or raise the limit named there"
    )


def _generators_silent(progress: Progress) -> StallCause:
    synced = _describe(progress.now.synced)
    problem = f"nothing has come for {progress.idle_s:.0f} s from generators that hold verified weights ({synced})"
    return StallCause(
        "silence", problem, "read their logs; one slow trajectory needs a larger learner.dead_end.after_s"
    )


def _too_slow(progress: Progress) -> StallCause:
    problem = f"it is incomplete after {progress.served_s:.0f} s, {progress.accepted} trajectories came meanwhile"
    return StallCause("slow", problem, f"start more generators, or raise {progress.limit_setting}")


def _describe(generators: Sequence[RoleStatus]) -> str:
    """State of the generators with the newest reports."""
    newest = sorted(generators, key=lambda generator: generator.report_age_s)
    more = [f"and {len(newest) - _MOST_NAMED} more"] if len(newest) > _MOST_NAMED else []
    return ", ".join([*map(_describe_one, newest[:_MOST_NAMED]), *more])


def _describe_one(generator: RoleStatus) -> str:
    reason = f": {generator.reason}" if generator.reason else ""
    if not generator.is_alive:
        return f"{generator.name} has been {generator.liveness} for {generator.report_age_s:.0f} s{reason}"
    holds = "no weights" if generator.version is None else f"version {generator.version}"
    running = f", {generator.running} trajectories running" if generator.running else ""
    return f"{generator.name} is {generator.state} with {holds}{running}{reason}"


def _count(counts: dict[str, int]) -> str:
    largest_first = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count} {name}" for name, count in largest_first[:_MOST_NAMED])
