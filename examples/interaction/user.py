"""User: a simulated teacher who shows where a wrong answer deviates."""

from typing import Any


def hint(answer: str, truth: str) -> str:
    """Return the truth up to the first wrong character: `4128` for `4138` -> `~413`."""
    same = next((place for place, (own, right) in enumerate(zip(answer, truth, strict=False)) if own != right), 0)
    return f"~{truth[: same + 1]}"


class User:
    """A simulated user with verl's interface. Each correction reduces the reward."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._price = config.get("price", 0.3)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], *, ground_truth: str, **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return whether the conversation ends, the hint, the answer's score, and metrics."""
        answer = messages[-1]["content"]
        if answer == ground_truth:
            return True, "", 0.0, {"corrections": 0}
        return False, hint(answer, ground_truth), -self._price, {"corrections": 1}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """No-op: this user keeps no state."""
