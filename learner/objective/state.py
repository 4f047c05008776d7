"""State of the objective that one step hands to the next; part of a checkpoint."""

import dataclasses
from dataclasses import dataclass


@dataclass
class ObjectiveState:
    """The same on every rank, since it follows from the whole batch. Numbers are None until they are first known."""

    baseline: float | None = None
    """Moving average of rewards."""
    kl_coefficient: float | None = None
    """Where an adaptive KL coefficient stands."""

    def save(self) -> dict[str, float]:
        """What is known, as plain numbers."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def restore(self, saved: dict[str, float]) -> None:
        """Take back what `save` gave."""
        self.baseline = saved.get("baseline")
        self.kl_coefficient = saved.get("kl_coefficient")
