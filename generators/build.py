"""Builders: engine and Generator from the run's config."""

import time
from typing import Any

from slipstream.broker.credentials import Keys
from slipstream.broker.messages import Member
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.weights.transport import WeightReceiver
from slipstream.configs.engines import HfEngineConfig, ScriptedEngineConfig, VllmEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.engines.engine import Engine
from slipstream.generators.generator import Generator
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.tokenization import PromptEncoder
from slipstream.runtime.clock import Clock
from slipstream.runtime.images import VisionModel
from slipstream.runtime.run_folder import RunFolder
from slipstream.runtime.trace import Trace


def build_engine(run: RunConfig, *, receiver: WeightReceiver) -> Engine:
    """Build the configured engine, not started. `receiver` serves hf and scripted; vLLM's worker builds its own."""
    # Imports stay local: torch and vLLM read the environment at import, and the scripted engine needs neither.
    match run.generators.engine:
        case VllmEngineConfig() as config:
            from slipstream.generators.engines.vllm.engine import VllmEngine

            return VllmEngine(run.model, config, seed=run.seed, reads_text=run.generators.reads_text)
        case HfEngineConfig() as config:
            from slipstream.generators.engines.hf_engine import HfEngine

            return HfEngine(run.model, config, receiver=receiver)
        case ScriptedEngineConfig() as config:
            from slipstream.generators.engines.scripted_engine import ScriptedEngine

            return ScriptedEngine(config, receiver=receiver)


def assemble(
    run: RunConfig,
    *,
    member: Member,
    client: BrokerClient,
    tokenizer: Any,
    receiver: WeightReceiver,
    keys: Keys | None = None,
    token: str = "",
    clock: Clock = time.monotonic,
) -> Generator:
    """Build a Generator and its parts. Nothing runs until `Generator.run`."""
    engine = build_engine(run, receiver=receiver)
    pool = RewardPool(run.generators.reward)
    trace = Trace(member.peer_id, RunFolder(run).profile)
    agent = AgentRunner(
        run=run,
        engine=engine,
        rewards=pool,
        encoder=PromptEncoder(
            tokenizer, max_prompt_tokens=run.data.max_prompt_tokens, vision=VisionModel(run.model.path)
        ),
        generator_id=member.peer_id,
        token=token,
        trace=trace,
    )
    return Generator(
        run=run,
        member=member,
        client=client,
        engine=engine,
        agent=agent,
        rewards=pool,
        keys=keys,
        trace=trace,
        clock=clock,
    )
