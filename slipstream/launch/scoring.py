"""Rewards of responses outside a run."""

import asyncio
from typing import Any

from slipstream.broker.messages import Row
from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput


def reward_input(row: Row, response: str, token_ids: list[int], **others: Any) -> RewardInput:
    """Build the input for a response to a row; `others` extend or replace the row's fields."""
    fields = {"ground_truth": row.ground_truth, "data_source": row.data_source, "extra_info": row.extra_info} | others
    return RewardInput(row.prompt, response, response_token_ids=token_ids, **fields)


async def score_group(pool: RewardPool, group: list[RewardInput]) -> list[Reward]:
    """Score answers to one row, together if the row's function compares them."""
    if group and pool.compares(group[0].data_source):
        return await pool.score_group(group)
    return await asyncio.gather(*map(pool.score, group))
