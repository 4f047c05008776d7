"""Evaluate models or existing responses on held-out sets, and compare scores with intervals."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from slipstream.broker.dataset import Dataset, open_heldout
from slipstream.broker.lease_scheduler import make_prompt
from slipstream.broker.messages import Row
from slipstream.buffer.records import EvaluationAnswer, make_answer
from slipstream.buffer.store_rules import asked_answers, evaluation_group_id, make_lease
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.configs.base import ConfigError, Record, require
from slipstream.configs.load import NO_MODEL_PATH, load_with_models
from slipstream.configs.run import RunConfig
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import load_tokenizer
from slipstream.launch.generate import AnswerFolder, Job, answer
from slipstream.launch.preflight import reward_input
from slipstream.learner.evaluation import Estimate, Score, by_source, differences, metric_sums, score
from slipstream.runtime.command_line import add_row, make_console, make_table
from slipstream.runtime.model_files import check_model_path
from slipstream.runtime.row_files import value_at

Answers = dict[str, list[EvaluationAnswer]]
"""Held-out set -> answers of one model."""


class Evaluation(Record):
    """Scores of one model on one set.

    Example: Evaluation(model="runs/mine/final_model", set="greedy", path="data/heldout.parquet", temperature=0.0,
        score=Score(...), by_source={"openai/gsm8k": Score(...), ...}, difference={"accuracy": Estimate(...), ...})
    """

    model: str
    """Model, or the file of existing responses, with the set `responses`."""
    set: str
    path: str
    temperature: float | None
    """None for existing responses."""
    score: Score
    by_source: dict[str, Score] = {}
    """Scores by data source; empty unless there are several."""
    difference: dict[str, Estimate] = {}
    """Paired difference to the first model; empty for the first."""


def show_evaluations(
    words: Sequence[str], *, out: Path | None, is_json: bool, is_whole: bool, files: Sequence[Path] = ()
) -> None:
    """Evaluate models or files of responses and print scores. Raises the errors of `evaluate`."""
    models, settings = load_with_models(list(words), is_optional=bool(files))
    if files and (len(models) > 1 or out or is_whole):
        got = "--out" if out else "--all" if is_whole else ", ".join(models)
        raise ConfigError(f"evaluate --responses takes one model or run at most, no --out, and no --all, got {got}.")
    found = score_files(settings, files) if files else evaluate(settings, models, out=out, is_whole=is_whole)
    if is_json:
        print(msgspec.json.encode({"evaluations": found}).decode())
        return
    console = make_console()
    for table in tables(found):
        console.print(table, "")


def evaluate(
    run: RunConfig, models: Sequence[str], *, out: Path | None = None, is_whole: bool = False
) -> list[Evaluation]:
    """Evaluate models on the prompts of the final evaluation or, with `is_whole`, all held-out ones.

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
            where = (model, each.name, each.path, each.temperature)
            found.append(_evaluation(*where, answers=answers[each.name], base=base[each.name]))
    return found


def _evaluation(*where: Any, answers: list[EvaluationAnswer], base: list[EvaluationAnswer]) -> Evaluation:
    difference = {} if answers is base else differences(metric_sums(answers), metric_sums(base))
    sources = {source: score(part) for source, part in by_source(answers).items()}
    return Evaluation(*where, score=score(answers), by_source=sources, difference=difference)


def _answers(run: RunConfig, out: Path | None, *, is_whole: bool) -> Answers:
    check_model_path(run.model.path)
    heldout = open_heldout(run)
    jobs: dict[str, list[Job]] = {}
    for each in run.data.eval_sets:
        dataset, name = heldout[each.name], each.name
        rows = range(len(dataset)) if is_whole else run.evaluation.rows(len(dataset))[1]
        lease_of = partial(make_lease, attempt=0, purpose=name, indices=[0], num_rows=len(dataset), seed=0)
        # One group per answer, as in a run.
        groups = (evaluation_group_id(name, number) for number in asked_answers(list(rows), samples=each.samples))
        jobs[name] = [Job(make_prompt(lease, dataset.row(lease.row)), 0, 1) for lease in map(lease_of, groups)]
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


# --- existing responses ----------------------------------------------------------------------------------------------
_RESPONSES = ("response", "responses", "completion", "completions")
"""Common names of the column: a text, or a list of texts."""


def score_files(run: RunConfig, files: Sequence[Path]) -> list[Evaluation]:
    """Score the responses in files with the run's reward functions.

    Rows with equal prompt and truth are one prompt. Raises ConfigError, EngineError.
    """
    counts_tokens = any(each.function == "length_penalty" for each in run.generators.reward.chosen)
    must, why = "name the model that wrote the responses, or a run", "length_penalty needs the numbers of tokens"
    require(run.model.path != NO_MODEL_PATH or not counts_tokens, "MODEL", must, got="none", why=why)
    prompts: dict[bytes, int] = {}
    found: list[Evaluation] = []
    base: list[EvaluationAnswer] = []
    for path in map(str, files):
        answers = _score_file(run, path, prompts)
        base = base or answers
        if {each.row for each in answers} != {each.row for each in base}:
            raise ConfigError(f"files of responses must have the same prompts to be compared, but {path} has others.")
        found.append(_evaluation(path, "responses", path, None, answers=answers, base=base))
    return found


def _score_file(run: RunConfig, path: str, prompts: dict[bytes, int]) -> list[EvaluationAnswer]:
    """`prompts`: prompt and ground truth -> number, extended by new ones."""
    tokenizer = load_tokenizer(run.model) if run.model.path != NO_MODEL_PATH else None
    numbers, samples = [], []
    for row in Dataset(path, columns=run.data.columns):
        number = prompts.setdefault(msgspec.json.encode([row.prompt, row.ground_truth]), len(prompts))
        own = [*_read_samples(row, path=path, column=run.data.columns.get("response", ""), tokenizer=tokenizer)]
        samples += own
        numbers += [number] * len(own)
    rewards = asyncio.run(_rewards(run, samples))
    if all(reward.status != "ok" for reward in rewards):
        reason = rewards[0].detail
        raise ConfigError(f"generators.reward ({run.generators.reward.summary}) must score {path}, but {reason}.")
    return [
        EvaluationAnswer(
            row=number,
            reward=reward.total,
            is_correct=reward.status == "ok" and reward.is_correct,
            status=reward.status,
            data_source=sample.data_source,
            stop_reason=sample.stop_reason,
            num_tokens=len(sample.response_token_ids),
            version=0,
            answer=(reward.detail or sample.response.strip()) if reward.status == "ok" else "",
        )
        for number, sample, reward in zip(numbers, samples, rewards, strict=True)
    ]


def _read_samples(row: Row, *, path: str, column: str, tokenizer: Any) -> Iterator[RewardInput]:
    """Yield a row's responses. `column`: empty = a common name. Raises ConfigError without one."""
    further = row.extra_info
    found = column or next((name for name in _RESPONSES if name in further), "")
    value = value_at(further, found)
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        got = f"only {', '.join(further) or 'prompt and truth'}" if value is None else f"{value!r:.60}"
        raise ConfigError(
            f"`{found or '` or `'.join(_RESPONSES)}` must be a text or a list of texts, got {got} in row {row.uid} of "
            f"{path}: name the column of your file with data.columns.response=NAME."
        )
    reason = str(further.get("stop_reason", "stop"))
    for text in texts:
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"] if tokenizer else []
        token_ids += [tokenizer.eos_token_id] if tokenizer and reason == "stop" else []
        others = {name: each for name, each in further.items() if name != found}
        messages = [{"role": "assistant", "content": text}]
        yield reward_input(row, text, token_ids, stop_reason=reason, extra_info=others, messages=messages)


async def _rewards(run: RunConfig, samples: Sequence[RewardInput]) -> list[Reward]:
    with closing(RewardPool(run.generators.reward)) as pool:
        return await asyncio.gather(*map(pool.score, samples))


# --- the tables ------------------------------------------------------------------------------------------------------
def tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """One table per set: models, and differences to the first."""
    sets: dict[str, list[Evaluation]] = {}
    for each in evaluations:
        sets.setdefault(each.set, []).append(each)
    made = []
    for group in sets.values():
        first, others = group[0], group[1:]
        table = make_table("", *(each.model for each in group), *(f"{each.model} minus the first" for each in others))
        asked = f"{first.score.num_prompts} prompts of {first.path}"
        asked += "" if first.temperature is None else f", temperature {first.temperature:g}"
        table.title, table.title_justify = f"{first.set}: {asked}", "left"
        for name in first.score.metrics:
            cells = [_cell(each.score.metrics, name) for each in group]
            add_row(table, name, *cells, *(_cell(each.difference, name, sign="+") for each in others))
        for source in first.by_source:
            for name in ("accuracy", "reward"):
                add_row(table, f"{name} of {source}", *(_cell(each.by_source[source].metrics, name) for each in group))
        scores = [each.score for each in group]
        add_row(table, "answers", *(each.num_answers for each in scores))
        add_row(table, "without a reward", *(each.num_failed for each in scores))
        if any(each.max_tokens for each in scores):
            add_row(table, "tokens", *(f"{each.mean_tokens:.1f}, at most {each.max_tokens}" for each in scores))
        reasons = (", ".join(f"{why} {n}" for why, n in each.stop_reasons.items()) for each in scores)
        add_row(table, "ended by", *reasons)
        made.append(table)
    return made


def _cell(metrics: Mapping[str, Estimate], name: str, *, sign: str = "") -> str:
    if (each := metrics.get(name)) is None:
        return "-"
    return f"{each.mean:{sign}.3f} [{each.low:{sign}.3f}, {each.high:{sign}.3f}]"
