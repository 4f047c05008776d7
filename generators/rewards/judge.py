"""Grader that asks a language model at an address with OpenAI's chat API."""

import asyncio
import json
import os
import re
from collections import deque
from typing import Any

import httpx

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.generators.rewards.reward import RewardInput

_TEMPLATE = """\
Grade an answer to a question.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer to grade:
{response}

Does the answer agree with the reference? Explain in one sentence, then write `Score: 1` if it does, else `Score: 0`."""
_PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth)\}")
_MAX_SHOWN = 80


class Judge:
    """Reward score / `scale` that the judge writes, in the last match of `pattern`; correct from `correct_from` up.

    An answer without a score, and a judge that is not there, are errors: the trajectory is masked, never a zero.
    """

    def __init__(
        self,
        *,
        address: str,
        model: str,
        template: str = _TEMPLATE,
        system: str = "",
        pattern: str = r"score:\s*([-+]?\d+(?:\.\d+)?)",
        scale: float = 1.0,
        correct_from: float = 1.0,
        max_tokens: int = 512,
        temperature: float = 0.0,
        requests_per_minute: float | None = None,
        api_key_variable: str = "OPENAI_API_KEY",
    ) -> None:
        """`address`: base of the API, such as http://judge:8000/v1. `template`: the judge's prompt, with {prompt},
        {response} and {ground_truth}. `pattern`: regular expression, whatever the case, whose group 1 is the score.
        `requests_per_minute`: of each worker; a call's wait counts to its time limit. `api_key_variable`: environment
        variable of the key, which may be missing.
        """
        try:
            self._pattern = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise ConfigError(f"pattern of judge must be a regular expression, got {pattern!r}: {error}.") from error
        if self._pattern.groups < 1 or "{response}" not in template:
            raise ConfigError("judge must have a pattern with a group for the score, and a template with {response}.")
        self._address = f"{address.rstrip('/')}/chat/completions"
        self._template, self._system = template, system
        self._scale, self._correct_from = scale, correct_from
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._interval_s = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next_at = 0.0
        key = os.environ.get(api_key_variable, "")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, sample: RewardInput) -> Reward:
        texts = {
            "prompt": _as_text(sample.prompt),
            "response": sample.response,
            "ground_truth": _as_text(sample.ground_truth),
        }
        # In one pass: an answer that contains {ground_truth} must not be told it.
        question = _PLACEHOLDER.sub(lambda found: texts[found.group(1)], self._template)
        messages = [{"role": "system", "content": self._system}] if self._system else []
        verdict = await self._ask([*messages, {"role": "user", "content": question}])
        found = next(iter(deque(self._pattern.finditer(verdict), maxlen=1)), None)
        if found is None:
            raise ValueError(f"the judge must write a score that the pattern finds, got {verdict[-_MAX_SHOWN:]!r}")
        score = float(found.group(1)) / self._scale
        return Reward(total=score, is_correct=score >= self._correct_from)

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        if self._interval_s:
            now = asyncio.get_running_loop().time()
            self._next_at = max(now, self._next_at) + self._interval_s
            await asyncio.sleep(self._next_at - self._interval_s - now)
        if self._client is None:
            # Made here, where the loop runs that it belongs to. The pool limits calls, in number and time.
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        try:
            answer = await self._client.post(
                self._address, json=self._options | {"messages": messages}, headers=self._headers
            )
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise RuntimeError(
                f"the judge at {self._address} must answer in OpenAI's form, got {type(error).__name__}: {error}"
            ) from error


def _as_text(value: Any) -> str:
    """Text of a prompt or a truth: chat messages one below the other, other values as JSON."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "content" in item for item in value):
        return "\n\n".join(f"{item.get('role', '')}: {item['content']}" for item in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
