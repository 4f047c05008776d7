"""A reward model in the worker's process: batches, and what becomes of answers when it dies or hangs."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward_model import RewardModel
from tests.tiny_model import make_tiny_model, make_tokenizer
from tests.unit.generators.rewards.scene import in_pool, sample, worker_pids


def make_reward_model(folder: Path) -> str:
    model = make_tiny_model(folder / "language")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder / "scoring")
    make_tokenizer().save_pretrained(folder / "scoring")
    return str(folder / "scoring")


class Marked(RewardModel):
    """Counts its batches in a file; hangs on an answer that starts with 99 while the file `hang` exists."""

    def __init__(self, *, folder: str, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._folder = Path(folder)

    def scores(self, batch: list[list[int]]) -> list[float]:
        with (self._folder / "batches").open("a") as file:
            file.write(f"{len(batch)}\n")
        while (self._folder / "hang").exists() and any(own[3:5] == [11, 11] for own in batch):
            time.sleep(0.01)
        return super().scores(batch)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_calls_share_batches_and_a_model_that_dies_or_hangs_costs_its_answers_alone(tmp_path: Path) -> None:
    path = make_reward_model(tmp_path)
    answers = [str(number) for number in range(100, 140)]
    config = RewardConfig(
        function=f"{__name__}:Marked",
        arguments={"path": path, "folder": str(tmp_path), "batch_size": 16, "device": "cpu"},
        timeout_s=3,
        max_memory_mib=None,
    )

    async def use(pool: RewardPool) -> list[list[Reward]]:
        async def scored(texts: list[str]) -> list[Reward]:
            return await asyncio.gather(*(pool.score(sample(text, prompt="12=")) for text in texts))

        found = [await scored(answers)]
        # A killed model: one answer is masked, the others are scored by the next worker.
        (tmp_path / "hang").touch()
        call = asyncio.create_task(scored(["991", "7"]))
        await asyncio.sleep(0.5)
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        (tmp_path / "hang").unlink()
        found.append(await call)
        # A hanging model: the answers that it delays are masked, and it is restarted.
        (tmp_path / "hang").touch()
        found.append(await scored(["991", "8"]))
        (tmp_path / "hang").unlink()
        found.append(await scored(["991", "8"]))
        return found

    first, killed, hung, after = in_pool(config, use)
    module = AutoModelForSequenceClassification.from_pretrained(path)
    tokens = [torch.tensor([make_tokenizer()(f"12={answer}")["input_ids"] + [1]]) for answer in answers]
    with torch.inference_mode():
        expected = [float(module(input_ids=own).logits) for own in tokens]
    # Padding changes the order of sums: a few roundings of products over 64 channels.
    bound = 64 * torch.finfo(torch.float32).eps * max(map(abs, expected))
    assert [reward.total for reward in first] == pytest.approx(expected, abs=bound)
    sizes = list(map(int, (tmp_path / "batches").read_text().split()))
    assert max(sizes) == 16
    assert len(sizes) < 12
    named = f"{__name__}:Marked"
    statuses = sorted((reward.status, "died (signal SIGKILL)" in reward.detail) for reward in killed)
    assert statuses == [("error", True), ("ok", False)]
    assert [(reward.status, reward.total, named in reward.detail) for reward in hung] == [("timeout", 0.0, True)] * 2
    assert [reward.status for reward in after] == ["ok"] * 2
