"""Graders that query a language model through OpenAI's chat API."""

import asyncio
import json
import os
import re
from typing import Any

import httpx

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.generators.rewards.reward import RewardInput, failed_reward

_TEMPLATE = """\
Grade an answer to a question.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer to grade:
{response}

Does the answer agree with the reference? Explain in one sentence, then write `Score: 1` if it does, else `Score: 0`."""
_PAIR_TEMPLATE = """\
Compare two answers to a question.

Question:
{prompt}

Answer A:
{a}

Answer B:
{b}

Which answer is better? Explain in one sentence, then write `Verdict: A`, `Verdict: B`, or `Verdict: tie`."""
_PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth|a|b)\}")
_MAX_SHOWN = 80
_BRADLEY_TERRY_ROUNDS = 200


class ChatClient:
    """Chat client with a rate limit."""

    def __init__(
        self,
        *,
        address: str,
        model: str,
        system: str = "",
        max_tokens: int = 512,
        temperature: float = 0.0,
        requests_per_minute: float | None = None,
        api_key_variable: str = "OPENAI_API_KEY",
    ) -> None:
        """`address`: base URL, e.g. http://judge:8000/v1. `requests_per_minute`: per worker; waiting counts toward a
        call's time limit.
        """
        self.address = f"{address.rstrip('/')}/chat/completions"
        self._system = system
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._interval_s = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next_at = 0.0
        key = os.environ.get(api_key_variable, "")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The pool limits number and time of calls.
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def ask(self, template: str, texts: dict[str, str]) -> str:
        """Fill the template's `{name}` placeholders and query the model. Raises RuntimeError."""
        # One pass, so that a {ground_truth} in an answer is not filled in.
        question = _PLACEHOLDER.sub(lambda found: texts.get(found.group(1), found.group()), template)
        messages = [{"role": "system", "content": self._system}] if self._system else []
        body = self._options | {"messages": [*messages, {"role": "user", "content": question}]}
        if self._interval_s:
            now = asyncio.get_running_loop().time()
            self._next_at = max(now, self._next_at) + self._interval_s
            await asyncio.sleep(self._next_at - self._interval_s - now)
        try:
            answer = await self._client.post(self.address, json=body, headers=self._headers)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise RuntimeError(
                f"the judge at {self.address} must answer in OpenAI's format, got {type(error).__name__}: {error}"
            ) from error


class Judge:
    """Reward: the judge's score, the last match of `pattern`, divided by `scale`.

    A missing score and an unreachable judge are errors, which are masked rather than scored 0.
    """

    def __init__(
        self,
        *,
        template: str = _TEMPLATE,
        pattern: str = r"score:\s*([-+]?\d+(?:\.\d+)?)",
        scale: float = 1.0,
        correct_from: float = 1.0,
        **client: Any,
    ) -> None:
        """`template`: prompt with {response} and optionally {prompt} and {ground_truth}. `pattern`: case-insensitive
        regular expression with the score in group 1. `correct_from`: minimum reward of a correct answer. `client`:
        arguments of ChatClient.
        """
        try:
            self._pattern = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise ConfigError(f"pattern of judge must be a regular expression, got {pattern!r}: {error}.") from error
        if self._pattern.groups < 1 or "{response}" not in template:
            raise ConfigError("judge requires a pattern with a group for the score, and a template with {response}.")
        self._template, self._scale, self._correct_from = template, scale, correct_from
        self._client = ChatClient(**client)

    async def __call__(self, sample: RewardInput) -> Reward:
        texts = {"prompt": _as_text(sample.prompt), "ground_truth": _as_text(sample.ground_truth)}
        verdict = await self._client.ask(self._template, texts | {"response": sample.response})
        found = [*self._pattern.finditer(verdict)]
        if not found:
            raise ValueError(f"the judge must write a score that matches the pattern, got {verdict[-_MAX_SHOWN:]!r}")
        score = float(found[-1].group(1)) / self._scale
        return Reward(total=score, is_correct=score >= self._correct_from)


class PairwiseJudge:
    """Reward from pairwise comparisons of the answers to a prompt, each pair judged in both orders.

    `method`: `win_rate` is the fraction of comparisons that an answer wins; ties count half. `bradley_terry` is its
    probability of beating an answer of average strength. Position bias cancels only with both orders, so a pair without
    both verdicts is skipped. An answer without any pair is an error.
    """

    def __init__(
        self, *, method: str = "win_rate", opponents: int | None = None, template: str = _PAIR_TEMPLATE, **client: Any
    ) -> None:
        """`opponents`: compare each answer with this many of the following ones; None = all. `template`: with {a}, {b},
        and optionally {prompt} and {ground_truth}. The last `Verdict: A`, `B`, or `tie` counts.
        `client`: arguments of ChatClient.
        """
        if method not in ("win_rate", "bradley_terry") or "{a}" not in template or "{b}" not in template:
            raise ConfigError(
                "pairwise_judge requires method=win_rate or bradley_terry, and a template with {a} and {b}, got "
                f"method={method!r}."
            )
        self._method, self._opponents, self._template = method, opponents, template
        self._client = ChatClient(**client)

    async def __call__(self, samples: list[RewardInput]) -> list[Reward]:
        count = len(samples)
        if count < 2:
            raise ValueError(f"pairwise_judge requires at least two answers to a prompt, got {count}")
        reach = count - 1 if self._opponents is None else min(self._opponents, count - 1)
        pairs = sorted({tuple(sorted((i, (i + step) % count))) for i in range(count) for step in range(1, reach + 1)})
        orders = [order for first, second in pairs for order in ((first, second), (second, first))]
        calls = [self._verdict(samples[a], samples[b]) for a, b in orders]
        verdicts = await asyncio.gather(*calls, return_exceptions=True)
        wins = [[0.0] * count for _ in range(count)]
        errors = [error for error in verdicts if isinstance(error, BaseException)]
        for (first, second), there, back in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
            if isinstance(there, float) and isinstance(back, float):
                share = (there + 1 - back) / 2
                wins[first][second], wins[second][first] = share, 1 - share
        met = [sum(wins[own][other] + wins[other][own] for other in range(count)) for own in range(count)]
        if not any(met) and errors:
            raise errors[0]
        strengths = [sum(row) / max(1.0, number) for row, number in zip(wins, met, strict=True)]
        if self._method == "bradley_terry":
            strengths = bradley_terry(wins)
        return [
            Reward(total=strength, parts={"pairs": number})
            if number
            else failed_reward("error", f"pairwise_judge: every comparison failed, e.g. with {errors[0]}")
            for strength, number in zip(strengths, met, strict=True)
        ]

    async def _verdict(self, a: RewardInput, b: RewardInput) -> float:
        """1 if `a` is better, 0 if `b` is, 0.5 for a tie."""
        truth = _as_text(a.ground_truth)
        texts = {"prompt": _as_text(a.prompt), "a": a.response, "b": b.response, "ground_truth": truth}
        answer = await self._client.ask(self._template, texts)
        found = re.findall(r"verdict:\W*(a|b|tie)\b", answer, re.IGNORECASE)
        if not found:
            raise ValueError(f"the judge must write `Verdict: A`, `B` or `tie`, got {answer[-_MAX_SHOWN:]!r}")
        return {"a": 1.0, "b": 0.0, "tie": 0.5}[found[-1].lower()]


def bradley_terry(wins: list[list[float]]) -> list[float]:
    """Probability that each answer beats one of average strength, given `wins[i][j]` of i against j.

    P(i beats j) = p_i / (p_i + p_j), with the iteration p_i = W_i / sum_j n_ij / (p_i + p_j); result p_i / (p_i + 1).
    Each answer also gets a virtual tie against strength 1, which fixes the scale and keeps p finite.

    Source: Hunter, MM algorithms for generalized Bradley-Terry models, Annals of Statistics 32, 2004, eq. 3.
    """
    count = len(wins)
    p = [1.0] * count
    for _ in range(_BRADLEY_TERRY_ROUNDS):
        games = [sum((wins[i][j] + wins[j][i]) / (p[i] + p[j]) for j in range(count) if j != i) for i in range(count)]
        p = [(sum(wins[i]) + 0.5) / (1 / (p[i] + 1) + games[i]) for i in range(count)]
    return [strength / (strength + 1) for strength in p]


def _as_text(value: Any) -> str:
    """Keep text, join chat messages with blank lines, and convert other values to JSON."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "content" in item for item in value):
        return "\n\n".join(f"{item.get('role', '')}: {item['content']}" for item in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
