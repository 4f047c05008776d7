"""Reward functions that compare texts, exactly or position by position, and one that ranks the answers to a prompt."""

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


def rank(samples: list[RewardInput], *, by: str = "") -> list[Reward]:
    """Reward the share of the other answers to the prompt that have a smaller score; equal ones count half.

    `by`: part of the reward by other functions that is the score; empty = their sum.
    """
    if len(samples) < 2 or any(sample.reward is None for sample in samples):
        raise ValueError(
            f"rank must have at least two answers, scored by another of generators.reward.functions, got {len(samples)}"
        )
    own = [sample.reward for sample in samples if sample.reward is not None]
    if by and any(by not in reward.parts for reward in own):
        raise ValueError(
            f"`by` of rank must be a part that every answer has, got {by!r}, not {', '.join(own[0].parts)}"
        )
    scores = [reward.parts[by] if by else reward.total for reward in own]
    shares = [(sum(other < score for other in scores) + (scores.count(score) - 1) / 2) for score in scores]
    return [
        Reward(total=share / (len(scores) - 1), is_correct=reward.is_correct)
        for share, reward in zip(shares, own, strict=True)
    ]
