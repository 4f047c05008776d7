"""State of the objective that one step hands to the next; part of a checkpoint."""

from dataclasses import dataclass, field


@dataclass
class ObjectiveState:
    """Equal on every rank, because it follows from the whole batch."""

    kl_coefficient: float | None = None
    """Current value of an adaptive KL coefficient; None before the first step, and where it is fixed."""
    advantage: dict[str, float] = field(default_factory=dict)
    """Numbers that the advantage function keeps, `AdvantageInputs.state`."""

    def save(self) -> dict[str, float]:
        """Return all numbers by name."""
        return self.advantage | ({} if self.kl_coefficient is None else {"kl_coefficient": self.kl_coefficient})

    def restore(self, saved: dict[str, float]) -> None:
        """Take back the numbers of `save`."""
        self.kl_coefficient = saved.get("kl_coefficient")
        self.advantage = {name: value for name, value in saved.items() if name != "kl_coefficient"}
