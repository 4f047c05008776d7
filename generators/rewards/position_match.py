"""position_match: the share of characters that are right, place by place."""

from buffer.trajectory import Reward
from generators.rewards.reward import RewardInput


def position_match(sample: RewardInput) -> Reward:
    """right places / longer of answer and truth; correct when all are right and the model ended its answer itself.

    Dividing by the longer one makes characters after the answer cost something.
    """
    answer, truth = sample.response, sample.ground_truth
    num_right = sum(a == t for a, t in zip(answer, truth, strict=False))
    num_places = max(len(answer), len(truth))
    share = num_right / num_places if num_places else 1.0
    is_correct = answer == truth and sample.stop_reason == "stop"
    return Reward(total=share, parts={"positions": share}, is_correct=is_correct)
