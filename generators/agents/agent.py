"""Agent: the protocol of an agent loop, and what it asks of the reward side."""

from typing import Protocol

from slipstream.broker.messages import Prompt
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.generators.rewards.reward import RewardInput


class Agent(Protocol):
    """From a leased prompt to a scored trajectory. Many calls run side by side on one loop."""

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        """Member `index` of the prompt's group. Raises PromptError, EngineError. Cancelling it aborts the request."""
        ...


class Scorer(Protocol):
    """What scores a sample: RewardPool, or a stand-in."""

    async def score(self, sample: RewardInput) -> Reward:
        """The reward; raises nothing."""
        ...
