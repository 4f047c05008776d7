"""Verdict on a guest: what the checks of its answers add up to."""

import math
from collections.abc import Sequence

from slipstream.buffer.trajectory import AnswerCheck

_MIN_LIES = 2
"""Lies that convict: one may be a fault of the machine, or of a reward function."""
_MIN_CHECKS = 4
"""Scored answers before their sums tell anything."""
_MAX_SURPLUS = 0.1
"""Most that the share of likeliest tokens may differ by, beside what chance allows: the policy has changed a little
since the answer, and engines differ."""
_DEVIATIONS = 4.0
"""Standard deviations that chance is allowed."""


def convict(checks: Sequence[AnswerCheck], *, max_logprob_diff: float) -> str:
    """Return the reason to quarantine the guest of these answers; empty without one."""
    lies = [check.lie for check in checks if check.lie]
    if len(lies) >= _MIN_LIES:
        return f"{len(lies)} of {len(checks)} answers that were checked are not what they say, the last: {lies[-1]}"
    scored = [check for check in checks if check.num_tokens]
    if len(scored) < _MIN_CHECKS:
        return ""
    num_tokens = sum(check.num_tokens for check in scored)
    of = f"over {num_tokens} tokens of {len(scored)} answers that were scored again"
    diff = sum(check.logprob_diff for check in scored) / num_tokens
    own = sum(check.own_logprob_diff * check.num_tokens for check in scored) / num_tokens
    # `not <=` rather than `>`: NaN must convict.
    if not diff <= max_logprob_diff + 2 * own:
        return (
            f"its log-probabilities must be those of the policy within {max_logprob_diff:g} nats on average, got "
            f"{diff:.3g} {of}; generators of one's own differ by {own:.2g}"
        )
    surplus = sum(check.surplus for check in scored) / num_tokens
    chance = _DEVIATIONS * math.sqrt(sum(check.variance for check in scored)) / num_tokens
    if not abs(surplus) <= _MAX_SURPLUS + chance:
        more = "more" if surplus > 0 else "less"
        return (
            f"its answers must be samples of the policy, got the likeliest token {abs(surplus):.0%} {more} often {of}: "
            "another model wrote them, or another way of sampling"
        )
    return ""
