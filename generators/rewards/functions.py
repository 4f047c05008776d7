"""Reward functions that compare texts: exact match, share of matching positions."""

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput, truth_text


def exact_match(sample: RewardInput, *, strip: bool = True, ignore_case: bool = False) -> Reward:
    """Reward 1 if the response equals the ground truth and ends with the end token, else 0."""
    answer, truth = sample.response, truth_text(sample, grader="exact_match")
    if strip:
        answer, truth = answer.strip(), truth.strip()
    if ignore_case:
        answer, truth = answer.casefold(), truth.casefold()
    is_correct = answer == truth and sample.stop_reason == "stop"
    return Reward(total=float(is_correct), is_correct=is_correct)


def position_match(sample: RewardInput) -> Reward:
    """Reward the share of matching positions: matches / (max(len(answer), len(truth)) + 1).

    The additional position is the end: it matches if the model wrote its end token where the truth ends. The reward is
    therefore 1 only for a correct answer, and both a missing end and trailing text cost.
    """
    answer, truth = sample.response, truth_text(sample, grader="position_match")
    is_end_right = sample.stop_reason == "stop" and len(answer) == len(truth)
    num_matches = sum(a == t for a, t in zip(answer, truth, strict=False)) + is_end_right
    share = num_matches / (max(len(answer), len(truth)) + 1)
    return Reward(total=share, parts={"positions": share}, is_correct=answer == truth and is_end_right)
