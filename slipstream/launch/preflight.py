"""Preflight: finds what is wrong with a run's surroundings before its folder is made and its roles are started."""

import subprocess
import sys
from pathlib import Path

from slipstream.broker.dataset import Dataset
from slipstream.broker.handshake import read_token
from slipstream.broker.transport.zmq_channels import ZmqServerChannel
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import RedisConfig
from slipstream.configs.data import PrepareStep
from slipstream.configs.run import RunConfig
from slipstream.generators.rewards.reward import load_reward
from slipstream.launch.replay_plan import plan_replay
from slipstream.runtime.model_files import check_model_path

# @@ Makes what a run needs and does not have: runs the `prepare` steps of its config whose product is missing, in order.
#
# python -m slipstream.launch.preflight experiment=addition_cpu
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


_STORE_TIMEOUT_S = 10.0


def check_surroundings(run: RunConfig) -> None:
    """Data, model, reward functions; for roles in processes also the broker's address, its token and a store's server.

    Of a replay the archive, which is read whole. Takes a second, or ten when a store or the model hub does not answer.
    Raises ConfigError, BrokerError, ReplayBufferError.
    """
    Dataset(run.data.train_path)
    Dataset(run.data.heldout_path)
    check_model_path(run.model.path)
    for reward in filter(None, (run.generators.reward, run.replay.reward)):
        load_reward(reward.function, reward.arguments)
    if run.mode == "replay":
        plan_replay(run)
    if run.mode == "async":
        read_token(run.broker)
        _check_address(run)
        _check_store(run)


def _check_address(run: RunConfig) -> None:
    """Taken and given back: were the broker the first to find it in use, our generators would join a stranger's run."""
    ZmqServerChannel(run.broker.address, max_message_bytes=run.broker.max_message_bytes).close()


def _check_store(run: RunConfig) -> None:
    if isinstance(run.buffer.store, RedisConfig):
        open_run_store(run.buffer.store.url, run.name, timeout_s=_STORE_TIMEOUT_S).close()
