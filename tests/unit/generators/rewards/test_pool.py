import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward_model import RewardModel
from slipstream.generators.rewards.worker import SIGNAL_EXIT
from tests.tiny_model import make_tiny_model, make_tokenizer
from tests.unit.generators.rewards.scene import SAMPLES, in_pool, sample, scores, until, worker_pids

FUNCTION = f"{SAMPLES}:by_response"


def use_pool(use: Callable[[RewardPool], Awaitable[None]], *, timeout_s: float = 20.0, **settings: Any) -> None:
    in_pool(RewardConfig(FUNCTION, timeout_s=timeout_s, **settings), use)


def statuses(responses: list[str], **settings: Any) -> list[tuple[str, str]]:
    rewards = scores(RewardConfig(FUNCTION, **({"timeout_s": 20.0} | settings)), [*map(sample, responses)])
    return [(reward.status, reward.detail) for reward in rewards]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_sample_gets_its_own_reward_and_one_that_cannot_be_sent_to_a_worker_an_error(num_workers: int):
    samples = [sample(response) for response in ("", "raise x", "nan", "print", "")]
    if num_workers:
        messages = ({"role": "user", "content": content} for content in (object(), "half \ud83d"))
        samples[1:1] = [msgspec.structs.replace(sample(), messages=[message]) for message in messages]
    config = RewardConfig(FUNCTION, num_workers=num_workers, timeout_s=20.0)
    first, *odd, raised, invalid, printed, last = scores(config, samples)
    assert first == printed == last == Reward(total=0.5)
    assert (raised.status, invalid.status) == ("error", "error")
    assert raised.detail.startswith("ValueError: no good: x, at ")
    plain = "the reward's input from an agent must be plain text and numbers, got "
    assert [(each.status, each.detail.startswith(plain)) for each in odd] == [("error", True)] * (2 * num_workers)


def test_a_hang_is_a_timeout_and_costs_only_the_culprit():
    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        answers = ["", "", "spin", *[""] * 40]
        rewards = await asyncio.gather(*(pool.score(sample(answer)) for answer in answers))
        assert [r.status for r in rewards] == ["timeout" if answer else "ok" for answer in answers]
        assert "generators.reward.timeout_s (2 s)" in rewards[2].detail
        again = await asyncio.gather(*(pool.score(sample(answer)) for answer in ["sleep 60", "sleep 60", ""]))
        assert [r.status for r in again] == ["timeout", "timeout", "ok"], "two hangs in a row"

    use_pool(use, timeout_s=2.0)


def test_a_reward_that_ends_its_worker_or_takes_its_memory_is_an_error_and_the_others_are_scored():
    bad = {
        "die": "worker died (signal SIGKILL)",
        "leave": "worker died (exit code 3)",
        "exit": "called sys.exit(3)",
        "allocate 900": "generators.reward.max_memory_mib",
        "leak 900": "generators.reward.max_memory_mib (600 MiB)",
    }
    between = "allocate 300"
    found = statuses([between, *(each for response in bad for each in (response, between))], max_memory_mib=600)
    assert [status for status, _ in found] == ["ok", *["error", "ok"] * len(bad)]
    assert [words for words, (_, detail) in zip(bad.values(), found[1::2], strict=True) if words not in detail] == []


def test_output_without_end_is_cut_and_the_function_goes_on(capfd: pytest.CaptureFixture[str]):
    assert statuses(["flood 8", "flood 8"]) == [("ok", "")] * 2
    printed = capfd.readouterr().out
    assert printed.startswith("flood flood")
    assert printed.endswith("is dropped]\n")
    assert len(printed) < 2**17


def test_cpu_time_is_limited_per_call():
    found = statuses(["", "burn", ""], max_cpu_s=1)
    assert [status for status, _ in found] == ["ok", "timeout", "ok"]
    assert "generators.reward.max_cpu_s (1 s)" in found[1][1]


def test_what_a_function_started_ends_with_its_worker(tmp_path: Path):
    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        for response, status in (("litter", "timeout"), ("litter-and-die", "error")):
            reward = await pool.score(sample(f"{response} {tmp_path / 'pids'}"))
            assert reward.status == status
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            assert len(pids) == 3
            # By themselves, they end after 20 s.
            await until(lambda pids=pids: not any(map(psutil.pid_exists, pids)), timeout_s=8)

    use_pool(use, timeout_s=4.0)


def test_time_in_the_queue_does_not_count_and_a_copy_that_the_function_forked_does_not_answer():
    assert statuses(["sleep 0.6"] * 5, timeout_s=2.5) == [("ok", "")] * 5
    assert [reward.total for reward in scores(RewardConfig(FUNCTION), [*map(sample, ["fork", ""] * 2)])] == [0.5] * 4


def test_several_workers_share_the_samples():
    async def use(pool: RewardPool) -> None:
        seen: set[float] = set()
        deadline = time.monotonic() + 20
        while len(seen) < 3 and time.monotonic() < deadline:
            seen |= {reward.total for reward in await asyncio.gather(*(pool.score(sample("pid")) for _ in range(6)))}
        assert seen == {float(pid) for pid in worker_pids(pool)}
        assert len(seen) == 3

    use_pool(use, num_workers=3)


def test_a_worker_that_cannot_be_ended_holds_nothing_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slipstream.generators.rewards.pool.REAP_TIMEOUT_S", 3.0)

    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        supervisor = psutil.Process(worker_pids(pool)[0]).parent()
        assert supervisor is not None
        supervisor.suspend()
        call = asyncio.create_task(pool.score(sample("sleep 20")))
        while not call.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            assert time.monotonic() - before < 2.0
        assert (await call).status == "timeout"
        assert await pool.score(sample()) == Reward(total=0.5)
        assert not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE
        psutil.Process(worker_pids(pool)[0]).parent().suspend()  # `close` ends such a worker, too

    use_pool(use, timeout_s=2.0)


def test_a_worker_ignores_ctrl_c_imports_nothing_large_and_is_replaced_when_killed():
    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        (worker,) = worker_pids(pool)
        os.kill(worker, signal.SIGINT)
        assert (await pool.score(sample("heavy"))).total == 0.0
        assert worker_pids(pool) == [worker]
        assert os.getpgid(worker) != os.getpgid(0)
        os.kill(worker, signal.SIGKILL)
        await until(lambda: worker_pids(pool) != [worker])
        assert await pool.score(sample()) == Reward(total=0.5)
        assert worker_pids(pool) != [worker]

    use_pool(use)


def test_a_cancelled_call_does_not_disturb_the_next_and_closing_ends_open_calls_and_workers():
    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        slow = asyncio.create_task(pool.score(sample("sleep 0.2")))
        await asyncio.sleep(0)
        slow.cancel()
        assert await pool.score(sample("raise x")) != Reward(total=0.5)
        assert await pool.score(sample()) == Reward(total=0.5)
        (worker,) = worker_pids(pool)
        call = asyncio.create_task(pool.score(sample("sleep 60")))
        await asyncio.sleep(0.05)
        pool.close()
        pool.close()
        assert (await asyncio.wait_for(call, 20)).status == "error"
        assert not psutil.pid_exists(worker)

    use_pool(use)


_PARENT = """
import asyncio, sys
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput
from tests.unit.generators.rewards.scene import worker_pids

async def main():
    pool = RewardPool(RewardConfig("tests.unit.generators.rewards.samples:by_response", timeout_s=60))
    await pool.score(RewardInput(prompt="", response="", ground_truth=""))
    print(worker_pids(pool)[0], flush=True)
    await pool.score(RewardInput(prompt="", response=sys.argv[1], ground_truth=""))

asyncio.run(main())
"""


def test_workers_end_when_their_pool_dies_even_during_a_sample_or_before_their_start():
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, "spin"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(20)
    worker.wait(20)
    pool = subprocess.Popen([sys.executable, "-c", ""])
    pool.wait()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "slipstream.generators.rewards.worker"]
        command += [*map(str, [theirs.fileno()] * 2), str(pool.pid)]
        # Our end stays open, as if a hanging function never read it.
        assert subprocess.run(command, pass_fds=[theirs.fileno()], timeout=60).returncode == SIGNAL_EXIT + 9


def test_a_machine_that_starts_no_process_says_so_and_the_next_answers_are_scored():
    async def use(pool: RewardPool) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            found = await pool.score(sample())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert found.detail == "no reward worker could be started: [Errno 24] Too many open files"
        assert (await pool.score(sample())).status == "ok"

    use_pool(use)


@pytest.mark.parametrize(("mistake", "reason"), [(True, "path must hold a model."), (False, "OSError: no such device")])
def test_a_function_that_cannot_be_loaded_says_why(mistake: bool, reason: str):
    (found,) = scores(RewardConfig(f"{SAMPLES}:Unready", arguments={"is_mistake": mistake}), [sample()])
    assert (found.status, found.detail) == ("error", f"no reward worker could be started: {reason}")


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
@pytest.mark.timeout(300)
def test_calls_share_batches_and_a_model_that_dies_or_hangs_costs_its_answers_alone(tmp_path: Path) -> None:
    path = make_reward_model(tmp_path)
    answers = [str(number) for number in range(100, 140)]
    arguments = {"path": path, "folder": str(tmp_path), "batch_size": 16, "device": "cpu"}
    config = RewardConfig(f"{__name__}:Marked", arguments=arguments, timeout_s=10, max_memory_mib=None)

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

    # Three workers, one after the other, import torch and load the model.
    first, killed, hung, after = in_pool(config, use, limit_s=240)
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
