"""Make prompt files of published tasks, from a local folder or from the Hugging Face hub.

    python -m slipstream.scripts.make_prompts gsm8k --out=data/gsm8k
    python -m slipstream.scripts.make_prompts math --source=path/to/copies --out=data/math
    python -m slipstream.scripts.make_prompts reasoning_gym:spell_backward --rows=5000 --out=data/spelling
    python -m slipstream.scripts.make_prompts environment:gsm8k_v1 --python=envs/bin/python --out=data/gsm8k

A local folder holds the published files, Parquet or JSON lines; `--list` shows their names. reasoning-gym needs
`pip install 'slipstream[tasks]'`, a verifiers environment the interpreter in `--python`.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from slipstream.configs.base import ConfigError, require
from slipstream.generators import environments
from slipstream.generators.rewards.mathematics import true_number
from slipstream.generators.rewards.procedural import UNRELIABLE
from slipstream.runtime.command_line import fail_cleanly, make_parser
from slipstream.runtime.row_files import is_json, read_lines, read_table
from slipstream.scripts.make_digits_data import make_row, split_rows, write_file

Values = dict[str, Any]
INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
TAGS = "Put the final answer between <answer> and </answer>."
_GYM = "reasoning_gym:"
_ENVIRONMENT = "environment:"


# --- one problem -----------------------------------------------------------------------------------------------------
def final_answer(answer: str) -> str:
    """Extract the number after `####`, without thousands separators. Raises ConfigError."""
    _, mark, number = answer.rpartition("####")
    try:
        true_number(number if mark else "")
    except ValueError:
        raise ConfigError(f"an answer of GSM8K must end in `#### number`, got `{answer[-40:]}`.") from None
    return number.strip().replace(",", "")


def last_boxed(solution: str) -> str:
    r"""Extract the content of the last `\boxed{...}`, including nested braces. Raises ConfigError."""
    _, mark, rest = solution.rpartition("\\boxed{")
    depth = 1
    for position, character in enumerate(rest if mark else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:position]
    raise ConfigError(f"a solution must hold its answer in \\boxed{{...}}, got `{solution[-40:]}`.")


def _math(values: Values) -> tuple[Any, Any]:
    return _ask(values["problem"], INSTRUCTION), str(values.get("answer") or last_boxed(values["solution"]))


def _question(values: Values) -> tuple[Any, Any]:
    answers = values.get("golden_answers") or [values["answer"]]
    return _ask(values["question"], TAGS), {"target": [str(answer) for answer in answers]}


def _ask(question: str, instruction: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{question.strip()} {instruction}"}]


# --- sources ---------------------------------------------------------------------------------------------------------
class Split(NamedTuple):
    """A hub dataset and the prefix of a file's path."""

    repository: str
    file: str


class Source(NamedTuple):
    """A published task and the files of its prompts."""

    data_source: str
    """Name in the rows, which selects the reward."""
    convert: Callable[[Values], tuple[Any, Any]]
    """Published row -> (prompt, ground truth)."""
    train: Split | None
    heldout: Split | None


_MATH = "DigitalLearningGmbH/MATH-lighteval"
_GEOMETRY = "hiyouga/geometry3k"
_QA = "RUC-NLPIR/FlashRAG_datasets"
_DAPO = "BytedTsinghua-SIA/DAPO-Math-17k"
SOURCES = {
    "gsm8k": Source(
        "openai/gsm8k",
        lambda values: (_ask(values["question"], INSTRUCTION), final_answer(values["answer"])),
        Split("openai/gsm8k", "main/train"),
        Split("openai/gsm8k", "main/test"),
    ),
    "math": Source("math", _math, Split(_MATH, "data/train"), Split("HuggingFaceH4/MATH-500", "test")),
    "geometry3k": Source(_GEOMETRY, _math, Split(_GEOMETRY, "data/train"), Split(_GEOMETRY, "data/test")),
    "aime_2024": Source("aime_2024", _math, None, Split("HuggingFaceH4/aime_2024", "data/train")),
    "aime_2025": Source("aime_2025", _math, None, Split("math-ai/aime25", "test")),
    "dapo_math": Source(
        "math_dapo",
        lambda values: (values["prompt"], values["reward_model"]["ground_truth"]),
        Split(_DAPO, "data/dapo-math-17k"),
        None,
    ),
    "hotpotqa": Source("hotpotqa", _question, Split(_QA, "hotpotqa/train"), Split(_QA, "hotpotqa/dev")),
    "nq": Source("nq", _question, Split(_QA, "nq/train"), Split(_QA, "nq/test")),
}
"""Prompts are used once: DAPO-Math repeats them a hundred times by mistake."""


def make_source(name: str, *, folder: Path | None, out: Path) -> None:
    """Write a source's files, from `folder` or the hub. Raises ConfigError."""
    source = SOURCES[name]
    splits = {"train": source.train, "heldout": source.heldout}
    # Read all files before writing any.
    rows = {ours: _convert(source, _read(split, folder=folder), split=ours) for ours, split in splits.items() if split}
    _write(out, rows)


def _write(out: Path, splits: dict[str, list[Values]], *, suffix: str = "parquet") -> None:
    for split, rows in splits.items():
        write_file(out / f"{split}.{suffix}", rows)
    print(f"{out}: {', '.join(f'{len(rows)} prompts in {split}' for split, rows in splits.items())}")


def _convert(source: Source, problems: list[Values], *, split: str) -> list[Values]:
    rows: dict[bytes, Values] = {}
    for number, values in enumerate(problems):
        try:
            prompt, truth = source.convert(values)
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            problem = error if isinstance(error, ConfigError) else f"it must have the published columns: {error!r}"
            raise ConfigError(f"row {number} of {source.data_source}, {split}: {problem}") from None
        row = make_row(prompt, ground_truth=truth, data_source=source.data_source, index=len(rows), split=split)
        images = values.get("images")
        # The same question about another image is another prompt.
        rows.setdefault(msgspec.json.encode([prompt, images]), row | ({"images": images} if images else {}))
    return list(rows.values())


def _read(split: Split, *, folder: Path | None) -> list[Values]:
    files = _find(folder, split) if folder else _download(split)
    if not files:
        name = Path(split.file).name
        where = f"--source={folder}" if folder else f"{split.repository} on the Hugging Face hub"
        raise ConfigError(f"{where} must hold {name}*.parquet or {name}*.jsonl, but has neither.")
    rows: list[Values] = []
    for file in files:
        try:
            rows += (
                [msgspec.json.decode(line, type=Values) for line in read_lines(file)]
                if is_json(file)
                else read_table(file).to_pylist()
            )
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{file} must be JSON lines, but cannot be read: {error}") from None
    return rows


def _find(folder: Path, split: Split) -> list[Path]:
    """At the published path, else by name; Parquet before JSON lines."""
    for pattern in (split.file, f"**/{split.file}", f"**/{Path(split.file).name}"):
        for suffix in ("parquet", "jsonl"):
            if found := sorted(folder.glob(f"{pattern}*.{suffix}")):
                return found
    return []


def _download(split: Split) -> list[Path]:
    try:
        wanted = [f"{split.file}*.parquet", f"{split.file}*.jsonl"]
        return _find(Path(snapshot_download(split.repository, repo_type="dataset", allow_patterns=wanted)), split)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        must = f"{split.repository} must be reachable on the Hugging Face hub, but is not ({type(error).__name__})"
        raise ConfigError(f"{must}: copy it to this machine and name its folder with --source.") from None


# --- verifiers environments ------------------------------------------------------------------------------------------
def make_environment_rows(
    environment: str, *, python: str, arguments: dict[str, Any], rows: int, heldout_rows: int, out: Path
) -> None:
    """Write the tasks of a verifiers environment for `generators/agent=environment`. Raises ConfigError."""
    first = {"environment": environment, "arguments": arguments, "max_turns": 1}
    asked = msgspec.json.encode(first) + b"\n" + msgspec.json.encode({"tasks": rows + heldout_rows}) + b"\n"
    worker = str(Path(environments.__file__).with_name("worker.py"))
    try:
        done = subprocess.run([python, worker], input=asked, stdout=subprocess.PIPE, timeout=600, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--python must name an interpreter with {environment}, got {python!r}: {error}") from None
    answers: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        answers |= msgspec.json.decode(line, type=Values)
    found = answers.get("tasks", [])
    must, why = f"be at most the tasks of {environment}", answers.get("failed", f"it has {len(found)} tasks")
    require(len(found) >= rows + heldout_rows, "--rows + --heldout-rows", must, got=rows + heldout_rows, why=why)

    def convert(task: Values, **place: Any) -> Values:
        prompt = task.get("prompt") or "(the environment opens the conversation)"
        system = [{"role": "system", "content": task["system_prompt"]}] if task.get("system_prompt") else []
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        row = make_row([*system, *messages], ground_truth=str(task.get("answer", "")), data_source=environment, **place)
        # As text, because tasks of one set may have different fields.
        return row | {"task": msgspec.json.encode(task).decode()}

    _write(out, split_rows(found, rows, convert))


# --- reasoning-gym ---------------------------------------------------------------------------------------------------
def make_gym_task(task: str, *, arguments: dict[str, Any], rows: int, heldout_rows: int, seed: int, out: Path) -> None:
    """Write a reasoning-gym task, with metadata for its verifier. Raises ConfigError."""
    if task in UNRELIABLE:
        raise ConfigError(f"the task {task!r} of reasoning-gym cannot be graded: {UNRELIABLE[task]}.")
    found = list(islice(_entries(task, arguments, size=2 * (rows + heldout_rows), seed=seed), rows + heldout_rows))
    must, why = f"be <= {len(found)}", f"there are no more different problems of {task!r} among twice as many drawn"
    require(len(found) >= rows + heldout_rows, "--rows + --heldout-rows", must, got=rows + heldout_rows, why=why)

    def convert(entry: Values, **place: Any) -> Values:
        truth = {"answer": entry["answer"], "metadata": entry["metadata"]}
        prompt = _ask(str(entry["question"]), TAGS)
        return make_row(prompt, ground_truth=truth, data_source=f"reasoning_gym/{task}", **place)

    _write(out, split_rows(found, rows, convert), suffix="jsonl")


def _entries(task: str, arguments: dict[str, Any], *, size: int, seed: int) -> Iterator[Values]:
    """Yield each question once."""
    try:
        # Local import, because it is optional and takes seconds.
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"{_GYM}{task} needs the library, got {error}: pip install 'slipstream[tasks]'.") from error
    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **arguments)
    except ValueError as error:
        raise ConfigError(f"{_GYM}TASK must name a task of reasoning-gym, got {task!r}: {error}") from None
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"--arguments must be settings of {task!r}, got {arguments}: {error}") from None
    asked = set()
    for entry in dataset:
        if entry["question"] not in asked:
            asked.add(entry["question"])
            yield entry


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Write the files."""
    parser = make_parser("slipstream.scripts.make_prompts", __doc__)
    parser.add_argument("task", nargs="?", default="", help=f"{', '.join(SOURCES)}, {_GYM}TASK or {_ENVIRONMENT}ID")
    parser.add_argument("--list", action="store_true", help="show the sources and their file prefixes")
    parser.add_argument("--source", type=Path, help="folder with the files (default: the hub)")
    parser.add_argument("--out", type=Path, help="folder to write to (data/TASK)")
    parser.add_argument("--rows", type=int, default=5000, help=f"training prompts, for {_GYM}TASK (5000)")
    parser.add_argument("--heldout-rows", type=int, default=500, help=f"held-out prompts, for {_GYM}TASK (500)")
    parser.add_argument("--python", default=sys.executable, help=f"interpreter with the library, for {_ENVIRONMENT}ID")
    ours = f"{_GYM}TASK or {_ENVIRONMENT}ID"
    parser.add_argument("--arguments", type=json.loads, default={}, help=f"JSON settings, for {ours}")
    parser.add_argument("--seed", type=int, default=0, help=f"seed of the problems, for {_GYM}TASK (0)")
    options = parser.parse_args(arguments)
    if options.list:
        for name, source in SOURCES.items():
            print(name, *(f"{split.repository}:{split.file}*" for split in (source.train, source.heldout) if split))
        return
    name = options.task.removeprefix(_GYM).removeprefix(_ENVIRONMENT)
    out = options.out or Path("data") / name
    made = {"arguments": options.arguments, "rows": options.rows, "heldout_rows": options.heldout_rows, "out": out}
    if options.task.startswith(_ENVIRONMENT):
        make_environment_rows(name, python=options.python, **made)
    elif options.task.startswith(_GYM):
        make_gym_task(name, seed=options.seed, **made)
    elif name in SOURCES:
        make_source(name, folder=options.source, out=out)
    else:
        raise ConfigError(f"the task must be one of {', '.join(SOURCES)}, or {_GYM}TASK, got {name or 'nothing'!r}.")


if __name__ == "__main__":
    main()
