"""position_match: the share of places that are right, the end of the answer being one of them."""

from buffer.trajectory import Reward
from generators.rewards.reward import RewardInput


def position_match(sample: RewardInput) -> Reward:
    """right places / places, where places = longer of answer and truth, and one more for the end.

    The end is right when the model wrote its end token where the truth ends. So the reward is 1 exactly for a correct
    answer, and neither a missing end nor anything written after the answer is free.
    """
    answer, truth = sample.response, sample.ground_truth
    ends_right = sample.stop_reason == "stop" and len(answer) == len(truth)
    num_right = sum(a == t for a, t in zip(answer, truth, strict=False)) + ends_right
    share = num_right / (max(len(answer), len(truth)) + 1)
    return Reward(total=share, parts={"positions": share}, is_correct=answer == truth and ends_right)
