"""Evaluates a model folder on held-out prompts, with the engine, agent and reward of a run but no run."""

import asyncio
import os
from collections.abc import Mapping, Sequence

from slipstream.broker.lease_scheduler import make_prompt
from slipstream.broker.messages import Prompt
from slipstream.broker.prompts.dataset import Dataset, open_datasets
from slipstream.broker.weights.memory import MemoryReceiver, MemoryWeights
from slipstream.buffer.trajectory import Purpose, Record, Reward
from slipstream.buffer.transitions import asked_answers, evaluation_group_id, make_lease
from slipstream.configs.data import HeldoutSet
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.build import build_engine
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer
from slipstream.runtime.model_files import check_model_path


class Score(Record):
    """Result on all prompts. Example: Score(accuracy=0.912, reward_mean=0.974, num_failed=0, num_answers=512)."""

    accuracy: float
    """Share of responses that are entirely right."""
    reward_mean: float
    """Mean over the responses whose reward function answered; 0 without any."""
    num_failed: int
    """Responses whose reward function failed; not right."""
    num_answers: int
    """Answers: prompts times samples of each."""


def evaluate(run: RunConfig) -> dict[Purpose, Score]:
    """Answer the held-out prompts that a run reports its final accuracy on, set by set.

    Blocks until all are answered. Raises ConfigError, GeneratorError.
    """
    check_model_path(run.model.path)
    _, heldout = open_datasets(run)
    for each in run.data.heldout_sets:
        prompts = f"{len(_rows(run, heldout[each.name]))} prompts of {each.path}"
        print(f"{run.model.path}: {each.name}: {prompts}" + f" x {each.samples}" * (each.samples > 1), flush=True)
    os.environ.update(vllm_environment(run))
    return asyncio.run(_evaluate(run, heldout))


def _rows(run: RunConfig, dataset: Dataset) -> range:
    return run.evaluation.rows(len(dataset))[1]


async def _evaluate(run: RunConfig, heldout: Mapping[str, Dataset]) -> dict[Purpose, Score]:
    # The receiver is never used: the engine samples from the weights of the folder.
    engine = build_engine(run, receiver=MemoryReceiver(MemoryWeights()))
    pool = RewardPool(run.generators.reward)
    encoder = PromptEncoder(load_tokenizer(run.model), max_prompt_tokens=run.data.max_prompt_tokens)
    agent = AgentRunner(run=run, engine=engine, rewards=pool, encoder=encoder, generator_id="evaluate")
    slots = asyncio.Semaphore(run.generators.max_concurrency)

    async def answer(prompt: Prompt) -> Reward:
        async with slots:
            return (await agent.answer(prompt, index=0)).reward

    await engine.start()
    scores = {}
    try:
        for each in run.data.heldout_sets:
            dataset = heldout[each.name]
            prompts = _prompts(each, dataset, list(_rows(run, dataset)))
            scores[each.name] = _score(await asyncio.gather(*map(answer, prompts)))
        return scores
    finally:
        pool.close()
        await engine.stop()


def _prompts(heldout: HeldoutSet, dataset: Dataset, rows: list[int]) -> list[Prompt]:
    """Prompts of a set, one for each answer, as a run leases them."""
    group_ids = [evaluation_group_id(heldout.name, answer) for answer in asked_answers(rows, samples=heldout.samples)]
    leases = [
        make_lease(group_id, attempt=0, purpose=heldout.name, indices=[0], num_rows=len(dataset), seed=0)
        for group_id in group_ids
    ]
    return [make_prompt(lease, dataset.row(lease.row)) for lease in leases]


def _score(rewards: Sequence[Reward]) -> Score:
    answered = [reward for reward in rewards if reward.status == "ok"]
    return Score(
        accuracy=sum(reward.is_correct for reward in answered) / len(rewards),
        reward_mean=sum(reward.total for reward in answered) / max(1, len(answered)),
        num_failed=len(rewards) - len(answered),
        num_answers=len(rewards),
    )
