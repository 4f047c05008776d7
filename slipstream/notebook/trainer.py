"""run and Trainer: an experiment with functions of one's own, from a script or a notebook."""

from pathlib import Path
from typing import Any

from slipstream.migration.translation import format_value
from slipstream.notebook.finished_run import Run
from slipstream.notebook.processes import Function, train


def run(
    *overrides: str,
    name: str,
    reward: Function | None = None,
    loss: Function | None = None,
    advantage: Function | None = None,
    agent: Function | None = None,
    runs_dir: str | Path = "runs",
) -> Run:
    """Train, as `slipstream run OVERRIDES` does, and return the run. Blocks until it has ended; prints its progress.

    `reward`, `loss`, `advantage`, `agent`: functions of one's own, in the forms of docs/rewards.md, docs/algorithms.md
    and docs/agents.md: the function itself, or `module:function`, or `FILE.py:function`. One that is defined in the
    notebook must import what it needs in its body.

    Raises ConfigError for settings that are not valid, RuntimeError when the run fails.

    Example: run("experiment=digits_serial", "learner.max_steps=20", name="first", reward=my_reward).metrics()
    """
    functions = {"reward": reward, "loss": loss, "advantage": advantage, "agent": agent}
    return Run(train(overrides, name=name, runs_dir=Path(runs_dir), functions=functions))


class Trainer:
    """An experiment that is run several times, each with a few settings of its own.

    Example: Trainer("experiment=digits_serial", model="models/mine", reward=my_reward).train(name="a", seed=1)
    """

    def __init__(
        self,
        *overrides: str,
        model: str | Path | None = None,
        data: str | Path | None = None,
        reward: Function | None = None,
        loss: Function | None = None,
        advantage: Function | None = None,
        agent: Function | None = None,
        runs_dir: str | Path = "runs",
    ) -> None:
        """`model` is model.path, `data` the file of data.train; the others as for `run`."""
        files = {"model.path": model, "data.train": data}
        own = [f"{key}={format_value(str(value))}" for key, value in files.items() if value is not None]
        self.overrides = [*overrides, *own]
        """Settings of every run."""
        self._functions = {"reward": reward, "loss": loss, "advantage": advantage, "agent": agent}
        self._runs_dir = runs_dir

    def train(self, *overrides: str, name: str, **settings: Any) -> Run:
        """Run the experiment, with further overrides or top-level `settings`, such as seed=1. Raises as `run` does."""
        own = [f"{key}={format_value(value)}" for key, value in settings.items()]
        return run(*self.overrides, *overrides, *own, name=name, runs_dir=self._runs_dir, **self._functions)
