"""Rewards of the shape of a response: tags, length, repetition. They are added to a grader's with weights."""

import re
from collections.abc import Sequence

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput


def format_tags(
    sample: RewardInput, *, tags: Sequence[str] = ("think", "answer"), is_first_open: bool = False
) -> Reward:
    """Reward 1 if the response is <think>...</think><answer>...</answer> and nothing else, each tag once, else 0.

    `is_first_open`: the prompt has opened the first tag, so the response starts inside it.

    Source: DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    # The marks alone decide, in their order: a pattern for the whole text could backtrack without end.
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", sample.response)
    outside = pieces[2::4] if is_first_open else pieces[0::4]
    is_right = pieces[1::2] == marks[is_first_open:] and not any(text.strip() for text in outside)
    return Reward(total=float(is_right), is_correct=is_right)


def length_penalty(sample: RewardInput, *, max_tokens: int) -> Reward:
    """Reward -L / max_tokens for a response of L tokens, at least -1: shorter answers are better."""
    return Reward(total=-min(1.0, len(sample.response_token_ids) / max_tokens))


def overlong_penalty(sample: RewardInput, *, max_tokens: int, buffer_tokens: int) -> Reward:
    """Reward 0 up to max_tokens - buffer_tokens, from there linearly down to -1 at max_tokens.

    reward = clip((max_tokens - buffer_tokens - L) / buffer_tokens, -1, 0)

    Source: DAPO, arXiv:2503.14476, eq. 13. `algorithm.reward` has the same in the learner, which can change it later.
    """
    excess = len(sample.response_token_ids) - (max_tokens - buffer_tokens)
    return Reward(total=-min(1.0, max(0.0, excess / buffer_tokens)))


def repetition_penalty(sample: RewardInput, *, ngram: int = 3) -> Reward:
    """Reward -(1 - different n-grams / n-grams) over the words of the response; 0 where it has fewer words than n.

    Source: Demystifying Long CoT, arXiv:2502.03373, appendix; Open-R1, `get_repetition_penalty_reward`.
    """
    words = sample.response.lower().split()
    ngrams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
    return Reward(total=len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0)
