"""exact_match: all or nothing."""

from buffer.trajectory import Reward
from generators.rewards.reward import RewardInput


def exact_match(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> Reward:
    """1 when the response equals the truth and the model ended its answer itself, else 0."""
    answer, truth = sample.response, sample.ground_truth
    if strip:
        answer, truth = answer.strip(), truth.strip()
    if ignore_case:
        answer, truth = answer.casefold(), truth.casefold()
    is_correct = answer == truth and sample.stop_reason == "stop"
    return Reward(total=float(is_correct), is_correct=is_correct)
