"""Makes what a run needs and does not have: runs the `prepare` steps of its config whose product is missing, in order.

python -m scripts.prepare experiment=addition_cpu
"""

import subprocess
import sys
from pathlib import Path

from configs.base import ConfigError
from configs.data import PrepareStep
from configs.exits import fail_cleanly
from configs.load import load
from configs.run import RunConfig

STEP_TIMEOUT_S = 3600.0
"""Longest run of one step: a download may be slow, a hang is not waited for."""


def missing_steps(config: RunConfig) -> list[PrepareStep]:
    """The steps whose product is not there."""
    return [step for step in config.prepare if not Path(step.creates).exists()]


def prepare(config: RunConfig) -> int:
    """Run the missing steps, their output going where ours goes. Returns how many ran.

    Blocks until the last has ended. Raises ConfigError with the failing step.
    """
    steps = missing_steps(config)
    for step in steps:
        print(f"prepare: {step.creates} is missing, making it with {step.module}", flush=True)
        _run(step)
    return len(steps)


def _run(step: PrepareStep) -> None:
    command = [sys.executable, "-m", step.module, *step.args]
    shown = f"python -m {step.module} {' '.join(step.args)}"
    try:
        code = subprocess.run(command, check=False, timeout=STEP_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        raise ConfigError(f"prepare step `{shown}` must end within {STEP_TIMEOUT_S:.0f} s, but did not.") from None
    if code != 0:
        raise ConfigError(f"prepare step `{shown}` failed with exit code {code}; its own message is above.")
    if not Path(step.creates).exists():
        raise ConfigError(f"prepare step `{shown}` must create {step.creates}, but did not: check prepare[].creates.")


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Command line: overrides as for run_async.py."""
    if prepare(load(sys.argv[1:] if arguments is None else arguments)) == 0:
        print("prepare: everything is there")


if __name__ == "__main__":
    main()
