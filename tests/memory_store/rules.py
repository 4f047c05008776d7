"""Group filter and success rates, as the scripts of the Redis store compute them in Lua (`prelude.lua`)."""

from dataclasses import dataclass

from slipstream.configs.base import Record
from slipstream.configs.buffer import AccuracyConfig, FilterConfig, ZeroSignalConfig
from slipstream.configs.data import CurriculumConfig


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Summary of a group's rewards. Example: GroupRewards(answered=8, correct=2, least=0.0, most=1.0)."""

    answered: int
    """Sampled members with a reward."""
    correct: int
    """Fully correct members among them."""
    least: float
    """Smallest reward of any member, including the greedy one; 0 without any."""
    most: float
    """Largest reward of any member, including the greedy one; 0 without any."""


def rejection_reason(rewards: GroupRewards, group_filter: FilterConfig) -> str:
    """Return why the filter rejects the group; empty if it passes."""
    if isinstance(group_filter, ZeroSignalConfig | AccuracyConfig) and not rewards.answered:
        return "no_reward"
    match group_filter:
        case ZeroSignalConfig(min_spread=least):
            return "zero_signal" if rewards.most - rewards.least < least else ""
        case AccuracyConfig(above=above, below=below):
            share = rewards.correct / rewards.answered
            return "too_hard" if share <= above else "too_easy" if share >= below else ""
        case _:
            return ""


class SuccessRate(Record):
    """Success rate of a row, weighted toward recent groups. Example: SuccessRate(answers=16, weight=12, right=3)."""

    answers: int = 0
    """Sampled answers with a reward, over all groups of the row."""
    weight: float = 0.0
    """The same, with each group discounted by `decay` for every group measured after it."""
    right: float = 0.0
    """Fully correct answers, discounted like `weight`."""

    def after(self, group: GroupRewards, curriculum: CurriculumConfig) -> "SuccessRate":
        """Return the rate after another complete group."""
        weight, right = self.weight * curriculum.decay + group.answered, self.right * curriculum.decay + group.correct
        return SuccessRate(self.answers + group.answered, weight, right)

    def flaw(self, curriculum: CurriculumConfig) -> str:
        """Return on which side of the band the row lies; empty inside the band, or with too few answers."""
        if self.answers < curriculum.min_answers:
            return ""
        share = self.right / self.weight
        return "too_hard" if share < curriculum.low else "too_easy" if share > curriculum.high else ""
