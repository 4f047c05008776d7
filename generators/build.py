"""Builds the engine and the Generator from the run's config."""

import time
import uuid
from typing import Any

import structlog

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Member
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.transport import WeightReceiver
from slipstream.configs.base import ConfigError
from slipstream.configs.engines import HfEngineConfig, ScriptedEngineConfig, VllmEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.episode import Agent
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.audit import Auditor
from slipstream.generators.engines.engine import Engine, ScriptedEngine
from slipstream.generators.generator import Generator
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.tokenization import PromptEncoder
from slipstream.runtime.clock import Clock
from slipstream.runtime.credentials import Keys
from slipstream.runtime.images import VisionModel
from slipstream.runtime.run_folder import RunFolder
from slipstream.runtime.trace import Trace

log = structlog.get_logger(__name__)


def build_engine(run: RunConfig) -> Engine:
    """Build the configured engine, without starting it."""
    # Local imports, because torch and vLLM read the environment at import.
    match run.generators.engine:
        case VllmEngineConfig() as config:
            from slipstream.generators.engines.vllm.engine import VllmEngine

            return VllmEngine(
                run.model,
                config,
                seed=run.seed,
                reads_text=run.generators.reads_text,
                stall_timeout_s=run.learner.stall.timeout_s,
            )
        case HfEngineConfig() as config:
            from slipstream.generators.engines.hf_engine import HfEngine

            return HfEngine(run.model, config)
        case ScriptedEngineConfig() as config:
            return ScriptedEngine(config)


def make_fetcher(run: RunConfig, keys: Keys, *, broker_address: str) -> Fetcher:
    """Build a fetcher, which with `cluster.network` also lends weights to other generators.

    Guests, generators that reach the broker over ipc, and machines outside the network never lend.
    """
    if run.cluster.network is not None and not keys.guest and not broker_address.startswith("ipc://"):
        try:
            return Fetcher(keys, lend_at=f"ipc://@slipstream-{uuid.uuid4().hex}", cluster=run.cluster)
        except (ConfigError, WeightTransferError) as error:
            log.warning("weights_not_lent", reason=str(error))
    return Fetcher(keys)


def assemble(
    run: RunConfig,
    *,
    member: Member,
    client: BrokerClient,
    tokenizer: Any,
    receiver: WeightReceiver,
    fetcher: Fetcher | None = None,
    token: str = "",
    clock: Clock = time.monotonic,
) -> Generator:
    """Build a Generator and its parts, without starting them."""
    engine = build_engine(run)
    pool = RewardPool(run.generators.reward)
    trace = Trace(member.peer_id, RunFolder(run).profile)
    encoder = PromptEncoder(
        tokenizer,
        max_prompt_tokens=run.data.max_prompt_tokens,
        template_variables=run.model.chat_template_kwargs,
        vision=VisionModel(run.model.path),
    )
    agent: Agent = AgentRunner(
        run=run, engine=engine, rewards=pool, encoder=encoder, generator_id=member.peer_id, token=token, trace=trace
    )
    if run.cluster.untrusted_generators.names:
        agent = Auditor(agent, engine=engine, rewards=pool, encoder=encoder, client=client)
    return Generator(
        run=run,
        member=member,
        client=client,
        engine=engine,
        agent=agent,
        rewards=pool,
        receiver=receiver,
        fetcher=fetcher,
        trace=trace,
        clock=clock,
    )
