"""Recording the tokens of a step, and the thread that writes them."""

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from structlog.testing import capture_logs

from slipstream.buffer.archive.step_tokens import StepTokens, read_steps, write_step
from slipstream.learner.batching.build_batch import build_batch
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.metrics_log import StepTokensWriter
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.step_metrics import TokenRecorder
from tests.unit.learner.builders import CPU, make_response

ENTROPY = np.array([0.5], np.float32)
ONE = StepTokens(["0-0-0"], [3], [np.array([2])], {"entropy": ENTROPY})
ALONE = Ranks(rank=0, size=1, device=CPU)
DEADLINE_S = 20.0


class TwoRanks(Ranks):
    """One of two ranks in one process, which share `others`: a sum includes the values of earlier calls."""

    def __init__(self, rank: int, others: list[torch.Tensor]) -> None:
        super().__init__(rank=rank, size=2, device=CPU)
        self._others = others

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self._others.append(values)
        return torch.stack(self._others).sum(0)


def make_built():
    """Two prompts: one with two responses, the second with a tool token, and one with a single response."""
    first = make_response(0, 0, response=(5, 6, 7))
    mask = first.model_mask.copy()
    mask[5] = False
    second = make_response(0, 1, response=(8, 9, 1), model_mask=mask)
    other = make_response(1, 0, response=(3, 1))
    groups = [[first, second], [other]]
    built = build_batch(groups, learner_version=0, max_lags=[None] * 2, weights=[1.0] * 2, num_updates=1, vocab_size=64)
    return [*groups[0], *groups[1]], built


def passes(built, *, rank: int = 0, num_ranks: int = 1):
    """Microbatches of at most ten tokens, with log-probability -id and entropy id for each trained token."""
    layout = Layout("shared_rows", 10, row_tokens=10)
    for microbatch in collate(built.updates[0], layout=layout, rank=rank, num_ranks=num_ranks):
        ids = microbatch.targets.float()
        yield microbatch, {"logprobs": -ids, "entropies": ids}


EXPECTED = {
    "0-0-0": {"learner_log_ratio": [None] * 4 + [-3.0, -4.0, -5.0], "learner_entropy": [None] * 4 + [5.0, 6.0, 7.0]},
    "0-0-1": {"learner_log_ratio": [None] * 4 + [-6.0, None, 1.0], "learner_entropy": [None] * 4 + [8.0, None, 1.0]},
    "1-0-0": {"learner_log_ratio": [None] * 4 + [-1.0, 1.0], "learner_entropy": [None] * 4 + [3.0, 1.0]},
}
"""Statistics of each trajectory if all generator log-probabilities are -2."""


def read_back(folder: Path, tokens: StepTokens | None) -> dict:
    assert tokens is not None
    writer = StepTokensWriter(folder, max_gib=1, in_background=False)
    writer.add(1, tokens)
    return read_steps(folder, dict.fromkeys(EXPECTED, 1))


def record(members, built, *, start_logprobs=None, ranks: Ranks | None = None, trained=None) -> StepTokens | None:
    """Statistics that this rank collects for these members, by default alone and for all trained tokens."""
    recorder, ranks = TokenRecorder(built.batch.tokens.replace(start_logprobs=start_logprobs)), ranks or ALONE
    batches = list(passes(built, rank=ranks.rank, num_ranks=ranks.size))
    assert len(batches) == 2 // ranks.size, "the group with its prompt, and the other"
    for microbatch, outputs in batches:
        recorder.add(microbatch, outputs)
    return recorder.collect(zip(members, trained or built.trained, strict=True), ranks=ranks)


def test_tokens_of_packed_trajectories_and_several_microbatches_find_their_places(tmp_path: Path) -> None:
    assert read_back(tmp_path, record(*make_built())) == EXPECTED


def test_ranks_put_their_shares_together_and_the_first_has_them(tmp_path: Path) -> None:
    others: list[torch.Tensor] = []
    assert record(*make_built(), ranks=TwoRanks(1, others)) is None
    assert read_back(tmp_path, record(*make_built(), ranks=TwoRanks(0, others))) == EXPECTED


def test_ratios_are_those_of_the_start_of_the_step_where_they_are_known() -> None:
    tokens = record(*make_built(), start_logprobs=torch.full((7,), -1.5))
    assert tokens is not None
    assert tokens.columns["log_ratio"].tolist() == [0.5] * 7
    assert tokens.columns["entropy"].tolist() == [5, 6, 7, 8, 1, 3, 1]


def test_trajectories_without_a_trained_token_and_those_of_another_run_are_left_out() -> None:
    members, built = make_built()
    # The second trajectory has no trained tokens, and the last belongs to another run.
    tokens = record(members[:2], built, trained=[built.trained[0], np.empty(0, np.int64)])
    assert tokens is not None
    assert (tokens.ids, tokens.lengths) == (["0-0-0"], [7])
    assert tokens.columns["entropy"].tolist() == [5, 6, 7]


class Slow(StepTokens):
    """Statistics that block their writer until `may_end` is set."""

    begun, may_end = threading.Event(), threading.Event()

    def to_table(self) -> pa.Table:
        self.begun.set()
        assert self.may_end.wait(DEADLINE_S)
        return super().to_table()


def test_a_slow_disk_costs_files_and_no_waiting(tmp_path: Path) -> None:
    writer = StepTokensWriter(tmp_path, max_gib=1, in_background=True)
    with capture_logs() as logged:
        writer.add(1, Slow(*ONE))
        assert Slow.begun.wait(DEADLINE_S)
        for step in range(2, 8):
            writer.add(step, ONE)
        Slow.may_end.set()
        writer.close()
    assert [(each["event"], each["step"]) for each in logged] == [("token_stats_not_written", n) for n in (6, 7)]
    assert [path.name[-9] for path in sorted(tmp_path.iterdir())] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_refuses_costs_the_file_alone(tmp_path: Path, in_background: bool) -> None:
    folder = tmp_path / "token_stats"
    folder.write_text("no folder")
    writer = StepTokensWriter(folder, max_gib=1, in_background=in_background)
    with capture_logs() as logged:
        writer.add(1, ONE)
        writer.close()
        assert [(each["event"], each["step"]) for each in logged] == [("token_stats_not_written", 1)]


def test_files_beyond_the_room_go_also_those_of_a_process_before(tmp_path: Path) -> None:
    sizes = [write_step(tmp_path, step, ONE) for step in range(1, 5)]
    writer = StepTokensWriter(tmp_path, max_gib=2.5 * sizes[0] / 2**30, in_background=False)
    for step in (5, 6, 7):
        writer.add(step, ONE)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:08}.parquet" for n in (step - 1, step)]
