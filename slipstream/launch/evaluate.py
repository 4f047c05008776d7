"""Evaluates a model folder on held-out prompts, with the engine, agent and reward of a run but no run."""

import asyncio
import os
from collections.abc import Sequence

from slipstream.broker.messages import Prompt
from slipstream.broker.prompts.dataset import Dataset, open_datasets
from slipstream.broker.weights.memory import MemoryReceiver, MemoryWeights
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Purpose, Record, Reward
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.build import build_engine
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer
from slipstream.runtime.model_files import check_model_path

PURPOSES: tuple[Purpose, ...] = ("sampled", "greedy")
"""Temperature 1 and temperature 0."""


class Score(Record):
    """Result on all prompts. Example: Score(accuracy=0.912, reward_mean=0.974, num_failed=0, num_prompts=512)."""

    accuracy: float
    """Share of responses that are entirely right."""
    reward_mean: float
    """Mean over the responses whose reward function answered; 0 without any."""
    num_failed: int
    """Responses whose reward function failed; not right."""
    num_prompts: int


def evaluate(run: RunConfig) -> dict[Purpose, Score]:
    """Answer the held-out prompts that a run reports its final accuracy on, sampled and greedily.

    Blocks until all are answered. Raises ConfigError, GeneratorError.
    """
    check_model_path(run.model.path)
    _, heldout = open_datasets(run)
    _, rows = run.evaluation.rows(len(heldout))
    print(f"{run.model.path}: {len(rows)} prompts of {run.data.heldout}", flush=True)
    os.environ.update(vllm_environment(run))
    return asyncio.run(_evaluate(run, heldout, rows))


async def _evaluate(run: RunConfig, heldout: Dataset, rows: Sequence[int]) -> dict[Purpose, Score]:
    # The receiver is never used: the engine samples from the weights of the folder.
    engine = build_engine(run, receiver=MemoryReceiver(MemoryWeights()))
    pool = RewardPool(run.generators.reward)
    encoder = PromptEncoder(load_tokenizer(run.model), max_prompt_tokens=run.data.max_prompt_tokens)
    agent = AgentRunner(run=run, engine=engine, rewards=pool, encoder=encoder, generator_id="evaluate")
    slots = asyncio.Semaphore(run.generators.max_concurrency)

    async def answer(purpose: Purpose, row: int) -> Reward:
        async with slots:
            return (await agent.answer(_prompt(heldout, row, purpose), index=0)).reward

    await engine.start()
    try:
        return {purpose: _score(await asyncio.gather(*(answer(purpose, row) for row in rows))) for purpose in PURPOSES}
    finally:
        pool.close()
        await engine.stop()


def _prompt(heldout: Dataset, row: int, purpose: Purpose) -> Prompt:
    found = heldout.row(row)
    lease = Lease(f"{purpose}:{row}-0", f"{purpose}:{row}", purpose, row, row, attempt=0, indices=[0])
    return Prompt(
        lease,
        uid=found.uid,
        prompt=found.prompt,
        ground_truth=found.ground_truth,
        data_source=found.data_source,
        extra_info=found.extra_info,
        agent_name=found.agent_name,
    )


def _score(rewards: Sequence[Reward]) -> Score:
    answered = [reward for reward in rewards if reward.status == "ok"]
    return Score(
        accuracy=sum(reward.is_correct for reward in answered) / len(rewards),
        reward_mean=sum(reward.total for reward in answered) / max(1, len(answered)),
        num_failed=len(rewards) - len(answered),
        num_prompts=len(rewards),
    )
