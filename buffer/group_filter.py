"""Group filter: decides from the rewards of a complete group whether it is rejected before training.

The in-memory store calls `rejection_reason`; the Redis store applies the same rule in Lua (`prelude.lua`), where a
group becomes complete and is rejected in one atomic operation.
"""

from dataclasses import dataclass

from slipstream.configs.buffer import AccuracyConfig, FilterConfig, ZeroSignalConfig

NO_REWARD = "no_reward"
"""No sampled member has a reward."""
ZERO_SIGNAL = "zero_signal"
"""The rewards of all members are alike."""
TOO_HARD = "too_hard"
"""Too few members are right."""
TOO_EASY = "too_easy"
"""Too many members are right."""
REJECTION_REASONS = (NO_REWARD, ZERO_SIGNAL, TOO_HARD, TOO_EASY)


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Summary of a group's rewards. Example: GroupRewards(answered=8, correct=2, least=0.0, most=1.0)."""

    answered: int
    """Sampled members whose reward function answered."""
    correct: int
    """Answered members that are entirely right."""
    least: float
    """Smallest reward of an answered member, the greedy one included; 0 without any."""
    most: float
    """Largest reward of an answered member, the greedy one included; 0 without any."""


def rejection_reason(rewards: GroupRewards, group_filter: FilterConfig) -> str:
    """Return why the filter rejects the group; empty when it passes."""
    if isinstance(group_filter, ZeroSignalConfig | AccuracyConfig) and not rewards.answered:
        return NO_REWARD
    match group_filter:
        case ZeroSignalConfig(min_spread=least):
            return ZERO_SIGNAL if rewards.most - rewards.least < least else ""
        case AccuracyConfig(above=above, below=below):
            share = rewards.correct / rewards.answered
            return TOO_HARD if share <= above else TOO_EASY if share >= below else ""
        case _:
            return ""


def filter_arguments(group_filter: FilterConfig) -> tuple[str, float, float]:
    """Return (kind, low, high) as the Redis store keeps them; a bound that a kind has not is 0."""
    match group_filter:
        case ZeroSignalConfig(min_spread=least):
            return "zero_signal", least, 0.0
        case AccuracyConfig(above=above, below=below):
            return "accuracy", above, below
        case _:
            return "none", 0.0, 0.0
