"""Reward functions for text."""

import re
import string
from collections.abc import Callable, Sequence

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput, model_text, truth_text, truth_texts


# --- comparisons -----------------------------------------------------------------------------------------------------
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
    """Reward the fraction of matching positions: matches / (max(len(answer), len(truth)) + 1).

    The extra position matches if the model wrote its end token where the truth ends.
    """
    answer, truth = sample.response, truth_text(sample, grader="position_match")
    is_end_right = sample.stop_reason == "stop" and len(answer) == len(truth)
    num_matches = sum(a == t for a, t in zip(answer, truth, strict=False)) + is_end_right
    share = num_matches / (max(len(answer), len(truth)) + 1)
    return Reward(total=share, parts={"positions": share}, is_correct=answer == truth and is_end_right)


def rank(samples: list[RewardInput], *, by: str = "") -> list[Reward]:
    """Reward an answer by the share of the prompt's other answers that it outscores. Ties count half.

    `by`: reward part to compare; empty = the total of the other functions.
    """
    own = [sample.reward for sample in samples if sample.reward is not None]
    if len(samples) < 2 or len(own) < len(samples):
        raise ValueError(
            "rank requires at least two answers, scored by another function in generators.reward.functions, got "
            f"{len(samples)}"
        )
    if by and any(by not in reward.parts for reward in own):
        parts = ", ".join(own[0].parts)
        raise ValueError(f"`by` of rank must be a part of every answer's reward ({parts}), got {by!r}")
    scores = [reward.parts[by] if by else reward.total for reward in own]
    wins = [sum(other < score for other in scores) + (scores.count(score) - 1) / 2 for score in scores]
    most = len(scores) - 1
    return [Reward(total=won / most, is_correct=reward.is_correct) for won, reward in zip(wins, own, strict=True)]


# --- answers to questions --------------------------------------------------------------------------------------------
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MAX_TAGS = 10


def qa_exact_match(sample: RewardInput, *, format_score: float = 0.0) -> Reward:
    """Reward 1 if the last <answer> equals a golden answer, `format_score` for a wrong answer, 0 without an answer.

    Ignores case, punctuation, and articles. Reads all model turns. With more than ten answer tags, a right answer gets
    0.25 and is not correct. The ground truth is a string, a list of strings, or {"target": either}.

    Source: Search-R1, arXiv:2503.09516; verl, utils/reward_score/search_r1_like_qa_em.py.
    """
    return _grade(sample, lambda answer, golden: answer == golden, format_score=format_score)


def qa_sub_match(sample: RewardInput, *, format_score: float = 0.0) -> Reward:
    """Like `qa_exact_match`, but the answer only has to contain a golden answer."""
    return _grade(sample, lambda answer, golden: golden in answer, format_score=format_score)


def _grade(sample: RewardInput, matches: Callable[[str, str], bool], *, format_score: float) -> Reward:
    texts = truth_texts(sample, grader="question answering")
    golden = [text for text in map(normalized, texts) if text]
    if not golden:
        raise ValueError(f"a golden answer must contain more than articles and punctuation, got {texts!r:.60}")
    text = model_text(sample)
    if not (answers := _ANSWER.findall(text)):
        return Reward(total=0.0)
    answer = normalized(answers[-1])
    if not any(matches(answer, text) for text in golden):
        return Reward(total=format_score, detail=answer)
    is_guess = max(text.count("<answer>"), text.count("</answer>")) > _MAX_TAGS
    return Reward(total=0.25 if is_guess else 1.0, is_correct=not is_guess, detail=answer)


def normalized(text: str) -> str:
    """Remove case, punctuation, articles, and repeated blanks: `The  U.S.` -> `us`."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


# --- form; added to a grader's rewards with weights ------------------------------------------------------------------
def format_tags(
    sample: RewardInput, *, tags: Sequence[str] = ("think", "answer"), is_first_open: bool = False
) -> Reward:
    """Reward 1 if the response is exactly <think>...</think><answer>...</answer>, each tag once, else 0.

    `is_first_open`: the prompt already opened the first tag.

    Source: DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    # A regular expression for the whole text could backtrack exponentially.
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", sample.response)
    outside = pieces[2::4] if is_first_open else pieces[0::4]
    is_right = pieces[1::2] == marks[is_first_open:] and not any(text.strip() for text in outside)
    return Reward(total=float(is_right), is_correct=is_right)


def length_penalty(sample: RewardInput, *, max_tokens: int) -> Reward:
    """Reward -L / max_tokens for a response of L tokens, at least -1."""
    return Reward(total=-min(1.0, len(sample.response_token_ids) / max_tokens))


def repetition_penalty(sample: RewardInput, *, ngram: int = 3) -> Reward:
    """Reward -(1 - distinct n-grams / n-grams) over the words of the response; 0 if it has fewer than n words.

    Source: Demystifying Long CoT, arXiv:2502.03373, appendix; Open-R1, `get_repetition_penalty_reward`.
    """
    words = sample.response.lower().split()
    ngrams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
    return Reward(total=len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0)
