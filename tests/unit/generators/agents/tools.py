"""Tools and agent loops of a user."""

import asyncio
import time
from typing import Any

from slipstream.generators.agents.episode import Episode

closed: list[str] = []


def weather(city: str, unit: str = "C") -> dict[str, Any]:
    """Look the weather up.

    Args:
        city: Name of the city.
        unit: C or F.
    """
    return {"city": city, "temperature": 21, "unit": unit}


def cut(kind: str) -> Any:
    """Return a value that is not plain text.

    Args:
        kind: Which.
    """
    if kind == "time":
        raise TimeoutError("the page must load within 5 s")
    return {("a", "b"): 1} if kind == "keys" else "half \ud83d"


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def stuck() -> str:
    """Never answer in time."""
    time.sleep(2.5)
    return "late"


def without_a_docstring(city: str) -> str:
    return city


class Counter:
    """A counter of one answer."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    async def __call__(self, step: int) -> str:
        """Count on.

        Args:
            step: How far.
        """
        self.count += step
        return str(self.count)

    def close(self) -> None:
        closed.append(f"at {self.count}")


class Uncalled:
    """A class without callable instances."""


async def corrected(episode: Episode, *, hint: str) -> None:
    """Two turns with one reward each, the second after a hint."""
    first = await episode.generate()
    episode.turn_rewards.append(0.25 if "42" in first.text else 0.0)
    episode.observe_messages([{"role": "user", "content": hint}])
    await episode.generate()
    episode.turn_rewards.append(0.5)
    episode.extras["hint"] = hint


async def careless(episode: Episode, *, field: str, value: Any) -> None:
    await episode.generate()
    setattr(episode, field, value)


async def failing(episode: Episode, *, how: str) -> None:
    await episode.generate()
    match how:
        case "broken":
            raise ValueError("no connection \ud83d")
        case "endless":
            await asyncio.sleep(60)
        case "wordless":
            await episode.generate(max_tokens=0)
        case "impatient":
            raise TimeoutError("the page must load within 5 s")
        case "forsaken":
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        case "leaving":
            raise SystemExit(0)
        case "unpaid":
            episode.turn_rewards += [1.0, 2.0]


async def ended(episode: Episode, *, stop: Any) -> None:
    await episode.generate(stop=stop)


async def unhurried(episode: Episode) -> None:
    await episode.generate()
    episode.observe("so " * 30)
    assert not (await episode.generate()).token_ids


async def silent(episode: Episode) -> None:
    """Return without a turn."""


def not_async(episode: Episode) -> None:
    """No coroutine function."""


class Teacher:
    """A simulated user with verl's interface: says `wrong` until the answer is right."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.word = config.get("word", "wrong")
        self.open: dict[str, Any] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        self.open[instance_id] = kwargs["ground_truth"]
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        is_right = self.open[instance_id] in messages[-1]["content"]
        return is_right, self.word, 1.0 if is_right else -0.25, {"corrections": int(not is_right)}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        closed.append(self.open.pop(instance_id))


class Pupil(Teacher):
    """Like Teacher, but not async, and with an invalid answer on request."""

    def start_interaction(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        self.open[instance_id] = kwargs["ground_truth"]

    def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return kwargs.get("answer") or (True, "", 0.5, {})

    def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        closed.append("at the end")
