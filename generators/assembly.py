"""Assembly: a Generator from its parts, as the config names them."""

import time
from typing import Any

from broker.clock import Clock
from broker.link import Link
from broker.messages import Member
from broker.weights.transport import WeightReceiver
from configs.run import RunConfig
from generators.agents.single_turn import SingleTurn
from generators.engines.build_engine import build_engine
from generators.generator import Generator
from generators.prompting import Prompting
from generators.rewards.pool import RewardPool


def assemble(
    run: RunConfig,
    *,
    member: Member,
    link: Link,
    tokenizer: Any,
    receiver: WeightReceiver,
    clock: Clock = time.monotonic,
) -> Generator:
    """Build everything a generator is made of; nothing is started yet, but for the reward workers."""
    engine = build_engine(run, receiver=receiver)
    reward = run.generators.reward
    pool = RewardPool(reward.function, reward.arguments, num_workers=reward.num_workers, timeout_s=reward.timeout_s)
    agent = SingleTurn(
        run=run,
        engine=engine,
        rewards=pool,
        prompting=Prompting(tokenizer, max_prompt_tokens=run.data.max_prompt_tokens),
        generator_id=member.peer_id,
    )
    return Generator(run=run, member=member, link=link, engine=engine, agent=agent, rewards=pool, clock=clock)
