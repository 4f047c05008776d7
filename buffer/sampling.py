"""What a step claims: from what is in the queue to a draw, or to the reason why there is none yet.

Pure, so that both stores draw the same. A store reads its `Queue`, carries out what `sift` says, and claims what `draw`
answers.
"""

from dataclasses import dataclass
from math import ceil

from slipstream.buffer.samplers import Candidate, Drawn, draw_fresh, draw_reused
from slipstream.buffer.trajectory import Record
from slipstream.configs.drawing import (
    AccuracyConfig,
    FifoConfig,
    FilterConfig,
    ReuseConfig,
    SamplerConfig,
    StalenessConfig,
    ZeroSignalConfig,
)

# @@ Group filter: whether a complete group teaches anything, by the rewards of its members.
NO_REWARD = "no_reward"
"""No sampled member has a reward."""
ZERO_SIGNAL = "zero_signal"
"""All rewards are alike."""
TOO_HARD = "too_hard"
"""Too few members are right."""
TOO_EASY = "too_easy"
"""Too many members are right."""
FLAWS = (NO_REWARD, ZERO_SIGNAL, TOO_HARD, TOO_EASY)
"""Reasons a filter rejects a group for."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What a filter sees of a group.

    Example: GroupRewards(answered=8, correct=2, least=0.0, most=1.0)
    """

    answered: int
    """Sampled members whose reward function answered."""
    correct: int
    """Those of them that are entirely right."""
    least: float
    """Of the rewards of answered members, the greedy one included; 0 without any."""
    most: float
    """The same, greatest."""


def flaw(rewards: GroupRewards, chosen: FilterConfig) -> str:
    """Why the filter rejects the group; empty when it does not. The Redis store says the same in Lua."""
    if isinstance(chosen, ZeroSignalConfig | AccuracyConfig) and not rewards.answered:
        return NO_REWARD
    match chosen:
        case ZeroSignalConfig(min_spread=least):
            return ZERO_SIGNAL if rewards.most - rewards.least < least else ""
        case AccuracyConfig(above=above, below=below):
            share = rewards.correct / rewards.answered
            return TOO_HARD if share <= above else TOO_EASY if share >= below else ""
        case _:
            return ""


def bounds(chosen: FilterConfig) -> tuple[str, float, float]:
    """(kind, low, high) as a script reads them; what a kind has no use for is 0."""
    match chosen:
        case ZeroSignalConfig(min_spread=least):
            return "zero_signal", least, 0.0
        case AccuracyConfig(above=above, below=below):
            return "accuracy", above, below
        case _:
            return "none", 0.0, 0.0


class DrawRules(Record):
    """How a run draws. Example: DrawRules(sampler=FreshestConfig(), staleness=StalenessConfig(on_stale="drop"))."""

    sampler: SamplerConfig = FifoConfig()
    """Which ready groups."""
    reuse: ReuseConfig = ReuseConfig()
    """How often, and what with groups used before."""
    staleness: StalenessConfig = StalenessConfig()
    """How old."""

    @property
    def only_oldest(self) -> bool:
        """Whether a draw is always the groups that became ready first: nothing else needs to be read."""
        return (
            isinstance(self.sampler, FifoConfig)
            and self.reuse.max_uses == 1
            and self.reuse.samples_per_insert is None
            and self.staleness.on_stale == "mask"
        )


class NotReady(Record):
    """Why a step got no groups. Example: NotReady(reason="3 of 32 groups are ready", ready_wanted=32)."""

    reason: str
    """For people."""
    ready_wanted: int
    """With this many groups ready it is worth asking again."""


class Queue(Record):
    """What there is to draw from, read at one instant."""

    ready: list[Candidate]
    """Complete, never trained on; in the order in which they became ready."""
    reusable: list[Candidate]
    """Used before; in the same order."""
    num_arrived: int
    """Groups that ever became ready."""
    num_uses: int
    """Uses of groups in the committed steps."""


class Sifted(Record):
    """What must leave the queue before a draw. Example: Sifted(expired=["17"])."""

    expired: list[str] = []
    """Over age, under `drop`."""
    released: list[str] = []
    """Not to be used again: too old, or too many are kept."""

    @property
    def is_empty(self) -> bool:
        """Whether all may stay."""
        return not (self.expired or self.released)


class Draw(Record):
    """What to claim. Example: Draw(group_ids=["380", "12"], weights=[1.0, 1.0], reused=[False, True])."""

    group_ids: list[str]
    """Fresh ones first."""
    weights: list[float]
    """What each one's loss is multiplied by."""
    reused: list[bool]
    """Which were used before."""


def sift(queue: Queue, rules: DrawRules, *, version: int) -> Sifted:
    """What is too old for a learner at `version`, or too much."""
    too_old = [c.id for c in queue.ready if version - c.oldest_version > rules.staleness.max_lag]
    reuse = rules.reuse
    surplus = len(queue.reusable) - reuse.max_groups
    released = [
        candidate.id
        for place, candidate in enumerate(queue.reusable)
        if place < surplus or (reuse.max_age is not None and version - candidate.oldest_version > reuse.max_age)
    ]
    return Sifted(expired=too_old if rules.staleness.on_stale == "drop" else [], released=released)


def draw(queue: Queue, rules: DrawRules, *, num_groups: int, seed: int, step: int) -> Draw | NotReady:
    """`num_groups` groups for `step`, or why not yet; `queue` is sifted."""
    if reason := _limit(queue, rules, num_groups=num_groups):
        return NotReady(reason, ready_wanted=len(queue.ready) + 1)
    num_fresh, num_reused = _shares(queue, rules.reuse, num_groups=num_groups)
    if num_fresh + num_reused < num_groups:
        return NotReady(
            _too_few(queue, num_groups=num_groups), ready_wanted=len(queue.ready) + num_groups - num_fresh - num_reused
        )
    fresh = draw_fresh(queue.ready, rules.sampler, num_groups=num_fresh, seed=seed, step=step)
    reused = draw_reused(queue.reusable, rules.sampler, num_groups=num_reused, seed=seed, step=step)
    return _join(fresh, reused)


def draw_oldest(oldest: list[str], *, num_groups: int, num_ready: int) -> Draw | NotReady:
    """The draw of rules with `only_oldest`: all of `oldest`, the groups that became ready first."""
    if len(oldest) < num_groups:
        return NotReady(_ready_of(num_ready, num_groups), ready_wanted=num_groups)
    return Draw(oldest, weights=[1.0] * num_groups, reused=[False] * num_groups)


def _join(fresh: Drawn, reused: Drawn) -> Draw:
    return Draw(
        group_ids=[*fresh.group_ids, *reused.group_ids],
        weights=[*fresh.weights, *reused.weights],
        reused=[False] * len(fresh.group_ids) + [True] * len(reused.group_ids),
    )


def _shares(queue: Queue, reuse: ReuseConfig, *, num_groups: int) -> tuple[int, int]:
    """(fresh, reused): as the fresh fraction says while there is enough of both, else more of the other."""
    num_fresh = min(len(queue.ready), ceil(reuse.fresh_fraction * num_groups))
    num_reused = min(len(queue.reusable), num_groups - num_fresh)
    return min(len(queue.ready), num_groups - num_reused), num_reused


def _limit(queue: Queue, rules: DrawRules, *, num_groups: int) -> str:
    most = rules.reuse.samples_per_insert
    if most is not None and queue.num_uses + num_groups > most * queue.num_arrived:
        return (
            f"{queue.num_uses} + {num_groups} uses are more than samples_per_insert ({most:g}) x {queue.num_arrived} "
            "groups that arrived"
        )
    return ""


def _too_few(queue: Queue, *, num_groups: int) -> str:
    reusable = f", {len(queue.reusable)} may be used again" if queue.reusable else ""
    return _ready_of(len(queue.ready), num_groups) + reusable


def _ready_of(num_ready: int, num_groups: int) -> str:
    return f"{num_ready} of {num_groups} groups are ready"
