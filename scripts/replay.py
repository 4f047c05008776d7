"""The replay: training again on what an earlier run has stored, in the batches in which that run trained on it.

    python run_async.py experiment=digits_replay replay.path=runs/mine/archive
    python run_async.py experiment=digits_replay replay.path=... learner.num_ranks=2 learner/engine=deepspeed_zero2
    python run_async.py experiment=digits_replay replay.path=... replay.rescore=my_rewards:strict

The learner of the serial run over a store filled from an archive, on one rank or several. No training prompt is
leased; the in-process generator answers held-out prompts alone, so that a replay has accuracies. With the settings, the
seed and the initial weights of the run that was stored, its batches come again bit for bit, and so do the losses of a
serial one; another algorithm shows what it would have made of the same data.
"""

import os
import subprocess
import sys
from contextlib import suppress

import torch

from broker.dataset import Dataset
from broker.logs import configure_logs
from broker.process import LAUNCHER_VARIABLE, die_with_launcher, raise_on_stop_signal
from broker.run_folder import RunFolder
from buffer.errors import BufferFault
from buffer.memory_store import MemoryStore
from buffer.records import FinishedGroup
from configs.exits import fail_cleanly
from configs.load import load
from configs.run import RunConfig
from generators.errors import GeneratorFault
from generators.prompting import Prompting, load_tokenizer
from learner.assembly import assemble_team
from learner.building import choose_device
from learner.deepspeed_config import deepspeed_environment
from learner.errors import LearnerFault, RanksFault
from learner.ranks import end_rank
from learner.torchrun import become_ranks
from scripts.replay_plan import ReplayPlan, plan_replay
from scripts.rescoring import rescore
from scripts.serial import run_serial

_STOP_TIMEOUT_S = 6.0


def run_replay(run: RunConfig, folder: RunFolder, *, overrides: list[str]) -> None:
    """Train from beginning to end: in this process, or with several ranks in processes of their own.

    Raises ConfigError, ArchiveFault, LearnerFault.
    """
    if run.learner.num_ranks == 1:
        _lead(run, folder, rendezvous=None)
    else:
        _run_ranks(run, overrides)


def _run_ranks(run: RunConfig, overrides: list[str]) -> None:
    """Each collective of the ranks has a deadline, so that this ends."""
    raise_on_stop_signal()
    variables = os.environ | {LAUNCHER_VARIABLE: str(os.getpid())}
    ranks = subprocess.Popen([sys.executable, "-m", "scripts.replay", *overrides], env=variables)
    try:
        code = ranks.wait()
    finally:
        ranks.terminate()
        with suppress(subprocess.TimeoutExpired):
            ranks.wait(timeout=_STOP_TIMEOUT_S)
        ranks.kill()
    if code:
        raise RanksFault(f"all {run.learner.num_ranks} learner ranks must end well, got exit code {code}: see above.")


@fail_cleanly(BufferFault, GeneratorFault, LearnerFault)
def main(overrides: list[str]) -> None:
    """One rank of a replay; as none, all of them, for `run_async.py`."""
    die_with_launcher()
    run = load(overrides)
    if "RANK" not in os.environ:
        become_ranks("scripts.replay", overrides, num_ranks=run.learner.num_ranks)
    raise_on_stop_signal()
    rank = int(os.environ["RANK"])
    configure_logs("learner" if rank == 0 else f"learner-rank-{rank}")
    if rank == 0:
        _lead(run, RunFolder(run), rendezvous="env://")
    else:
        _follow(run, rank=rank)
    end_rank()


def _lead(run: RunConfig, folder: RunFolder, *, rendezvous: str | None) -> None:
    plan = plan_replay(run)
    groups = _rescored(run, plan)

    def fill(store: MemoryStore) -> None:
        store.load(groups, draws=plan.draws)

    run_serial(run, folder, prepare_store=fill, device=_device(run), rendezvous=rendezvous)


def _rescored(run: RunConfig, plan: ReplayPlan) -> list[FinishedGroup]:
    if run.replay.reward is None:
        return plan.groups
    prompting = Prompting(load_tokenizer(run.model), max_prompt_tokens=run.data.max_prompt_tokens)
    return rescore(plan.groups, run.replay.reward, prompts=Dataset(run.data.train_path), prompting=prompting)


def _follow(run: RunConfig, *, rank: int) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assemble_team(run, folder=RunFolder(run), device=_device(run), rank=rank, rendezvous="env://").follow()


def _device(run: RunConfig) -> torch.device:
    """This rank's, which DeepSpeed is told of."""
    device = choose_device(run.learner.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    os.environ.update(deepspeed_environment(device))
    return device


if __name__ == "__main__":
    main(sys.argv[1:])
