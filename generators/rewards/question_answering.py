"""Graders of short answers to questions, given in <answer> tags."""

import re
import string
from collections.abc import Callable

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput, model_text, truth_texts

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MAX_TAGS = 10


def qa_exact_match(sample: RewardInput, *, format_score: float = 0.0) -> Reward:
    """Reward 1 if the last <answer> equals one of the golden answers, `format_score` for another one, else 0.

    Case, punctuation and articles do not count. All turns of the model are read. A quarter of it where there are more
    than ten answer tags, which try them all. The ground truth is a text, a list of texts, or {"target": either}.

    Source: Search-R1, arXiv:2503.09516; verl, utils/reward_score/search_r1_like_qa_em.py.
    """
    return _grade(sample, lambda answer, golden: answer == golden, format_score=format_score)


def qa_sub_match(sample: RewardInput, *, format_score: float = 0.0) -> Reward:
    """Reward as `qa_exact_match`, for an answer that contains one of the golden answers."""
    return _grade(sample, lambda answer, golden: golden in answer, format_score=format_score)


def _grade(sample: RewardInput, matches: Callable[[str, str], bool], *, format_score: float) -> Reward:
    texts = truth_texts(sample, grader="question answering")
    golden = [text for text in map(normalised, texts) if text]
    if not golden:
        raise ValueError(f"a golden answer must hold more than articles and punctuation, got {texts!r:.60}")
    text = model_text(sample)
    answers = _ANSWER.findall(text)
    if not answers:
        return Reward(total=0.0)
    answer = normalised(answers[-1])
    if not any(matches(answer, text) for text in golden):
        return Reward(total=format_score, detail=answer)
    is_guess = max(text.count("<answer>"), text.count("</answer>")) > _MAX_TAGS
    return Reward(total=0.25 if is_guess else 1.0, is_correct=not is_guess, detail=answer)


def normalised(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and double blanks: `The  U.S.` -> `us`."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())
