"""Evaluate models on held-out sets and compare their scores, with intervals."""

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import msgspec
from rich.table import Table

from slipstream.broker.dataset import Dataset, open_heldout
from slipstream.broker.lease_scheduler import make_prompt
from slipstream.buffer.records import EvaluationAnswer, make_answer
from slipstream.buffer.store_rules import asked_answers, evaluation_group_id, make_lease
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import Record
from slipstream.configs.data import EvalSet
from slipstream.configs.load import load_with_models
from slipstream.configs.run import RunConfig
from slipstream.generators.tokenization import load_tokenizer
from slipstream.launch.generate import AnswerFolder, Job, answer
from slipstream.learner.evaluation import Estimate, Score, by_source, differences, metric_sums, score
from slipstream.runtime.command_line import add_row, make_console, make_table
from slipstream.runtime.model_files import check_model_path

Answers = dict[str, list[EvaluationAnswer]]
"""Held-out set -> answers of one model."""


class Evaluation(Record):
    """Scores of one model on one set.

    Example: Evaluation(model="runs/mine/final_model", set="greedy", path="data/heldout.parquet", temperature=0.0,
        score=Score(...), by_source={"openai/gsm8k": Score(...), ...}, difference={"accuracy": Estimate(...), ...})
    """

    model: str
    set: str
    path: str
    temperature: float
    score: Score
    by_source: dict[str, Score] = {}
    """Scores by data source; empty unless there are several."""
    difference: dict[str, Estimate] = {}
    """Paired difference to the first model; empty for the first."""


def show_evaluations(words: Sequence[str], *, out: Path | None, is_json: bool, is_whole: bool) -> None:
    """Evaluate models and print scores. Raises the errors of `evaluate`."""
    models, settings = load_with_models(list(words))
    found = evaluate(settings, models, out=out, is_whole=is_whole)
    if is_json:
        print(msgspec.json.encode({"evaluations": found}).decode())
        return
    console = make_console()
    for table in tables(found):
        console.print(table, "")


def evaluate(
    run: RunConfig, models: Sequence[str], *, out: Path | None = None, is_whole: bool = False
) -> list[Evaluation]:
    """Evaluate models on the prompts of a run's final evaluation or, with `is_whole`, all held-out prompts.

    `out`: folder for answers; several models get one folder each. Raises ConfigError, GeneratorError, RunConflictError,
    ArchiveError.
    """
    found: list[Evaluation] = []
    base: Answers = {}
    for number, model in enumerate(models, start=1):
        own = msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, path=model))
        folder = out / f"model-{number}" if out and len(models) > 1 else out
        answers = _answers(own, folder, is_whole=is_whole)
        base = base or answers
        for each in run.data.eval_sets:
            own_answers = answers[each.name]
            difference = {} if answers is base else differences(metric_sums(own_answers), metric_sums(base[each.name]))
            sources = {source: score(part) for source, part in by_source(own_answers).items()}
            where = (model, each.name, each.path, each.temperature)
            found.append(Evaluation(*where, score=score(own_answers), by_source=sources, difference=difference))
    return found


def _answers(run: RunConfig, out: Path | None, *, is_whole: bool) -> Answers:
    check_model_path(run.model.path)
    heldout = open_heldout(run)
    jobs = {each.name: _jobs(each, heldout[each.name], is_whole, run=run) for each in run.data.eval_sets}
    answers: Answers = {name: [] for name in jobs}
    tokenizer = load_tokenizer(run.model)

    def record(trajectory: Trajectory) -> None:
        name, _, asked = trajectory.group_id.rpartition(":")
        text = tokenizer.decode(trajectory.token_ids[trajectory.model_mask].tolist(), skip_special_tokens=True).strip()
        answers[name].append(make_answer(int(asked.partition(".")[0]), trajectory, text=text))

    folder = AnswerFolder(out, run=run, outcome="evaluated", is_whole=is_whole) if out else None

    def keep(job: Job, trajectory: Trajectory) -> None:
        record(trajectory)
        if folder:
            folder.add(job, trajectory)

    with closing(folder) if folder else nullcontext():
        for trajectory in folder.stored if folder else ():
            record(trajectory)
        missing = [job for each in jobs.values() for job in each if not folder or folder.lacks(job)]
        answer(run, missing, on_answer=keep, title=run.model.path)
    return answers


def _jobs(heldout: EvalSet, dataset: Dataset, is_whole: bool, *, run: RunConfig) -> list[Job]:
    """Return one group per answer, as a run leases them."""
    rows = range(len(dataset)) if is_whole else run.evaluation.rows(len(dataset))[1]
    leases = [
        make_lease(
            evaluation_group_id(heldout.name, asked),
            attempt=0,
            purpose=heldout.name,
            indices=[0],
            num_rows=len(dataset),
            seed=0,
        )
        for asked in asked_answers(list(rows), samples=heldout.samples)
    ]
    return [Job(make_prompt(lease, dataset.row(lease.row)), 0, 1) for lease in leases]


# --- the tables ------------------------------------------------------------------------------------------------------
def tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """One table per set, with columns for models and differences to the first."""
    sets: dict[str, list[Evaluation]] = {}
    for each in evaluations:
        sets.setdefault(each.set, []).append(each)
    made = []
    for group in sets.values():
        first, others = group[0], group[1:]
        table = make_table("", *(each.model for each in group), *(f"{each.model} minus the first" for each in others))
        asked = f"{first.score.num_prompts} prompts of {first.path}, temperature {first.temperature:g}"
        table.title, table.title_justify = f"{first.set}: {asked}", "left"
        for name in first.score.metrics:
            cells = [_cell(each.score.metrics, name) for each in group]
            add_row(table, name, *cells, *(_cell(each.difference, name, sign="+") for each in others))
        for source in first.by_source:
            for name in ("accuracy", "reward"):
                cells = [_cell(each.by_source[source].metrics, name) for each in group]
                add_row(table, f"{name} of {source}", *cells)
        scores = [each.score for each in group]
        add_row(table, "answers", *(each.num_answers for each in scores))
        add_row(table, "without a reward", *(each.num_failed for each in scores))
        add_row(table, "tokens", *(f"{each.mean_tokens:.1f}, at most {each.max_tokens}" for each in scores))
        reasons = [", ".join(f"{why} {n}" for why, n in each.stop_reasons.items()) for each in scores]
        add_row(table, "ended by", *reasons)
        made.append(table)
    return made


def _cell(metrics: Mapping[str, Estimate], name: str, *, sign: str = "") -> str:
    if (each := metrics.get(name)) is None:
        return "-"
    return f"{each.mean:{sign}.3f} [{each.low:{sign}.3f}, {each.high:{sign}.3f}]"
