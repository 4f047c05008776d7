"""Makes prompt files of GSM8K, grade-school maths, from a folder on this machine or from the Hugging Face hub.

    python -m slipstream.scripts.make_gsm8k_data --out=data/gsm8k
    python -m slipstream.scripts.make_gsm8k_data --source=path/to/gsm8k --out=data/gsm8k

A folder holds train and test files, as `train*.parquet` and `test*.parquet` or `train.jsonl` and `test.jsonl`, with
the columns `question` and `answer`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from slipstream.configs.base import ConfigError
from slipstream.generators.rewards.mathematics import true_number
from slipstream.runtime.command_line import fail_cleanly
from slipstream.scripts.make_digits_data import make_row, write_pair

HUB_NAME = "openai/gsm8k"
INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
SPLITS = {"train": "train", "heldout": "test"}
"""Name of a split here -> in GSM8K."""


def final_answer(answer: str) -> str:
    """Extract the number after `####`, without thousands separators. Raises ConfigError."""
    _, mark, number = answer.rpartition("####")
    try:
        true_number(number if mark else "")
    except ValueError:
        raise ConfigError(f"an answer of GSM8K must end in `#### number`, got `{answer[-40:]}`.") from None
    return number.strip().replace(",", "")


def convert(problem: dict[str, Any], *, index: int, split: str) -> dict[str, Any]:
    """Convert {"question": ..., "answer": ...} to a row with a chat prompt. Raises ConfigError."""
    prompt = [{"role": "user", "content": f"{problem['question'].strip()} {INSTRUCTION}"}]
    truth = final_answer(problem["answer"])
    return make_row(prompt, ground_truth=truth, data_source=HUB_NAME, index=index, split=split)


def read_source(folder: Path, *, split: str) -> list[dict[str, Any]]:
    """Read the problems of one split from a local folder. Raises ConfigError."""
    parquet = sorted(folder.rglob(f"{split}*.parquet"))
    lines = folder / f"{split}.jsonl"
    if parquet:
        problems = [row for file in parquet for row in pq.read_table(file).to_pylist()]
    elif lines.is_file():
        problems = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        raise ConfigError(f"--source={folder} must hold {split}*.parquet or {split}.jsonl, but has neither.")
    if not problems or not {"question", "answer"} <= problems[0].keys():
        raise ConfigError(f"the {split} problems in {folder} must have the columns `question` and `answer`.")
    return problems


def download(split: str) -> list[dict[str, Any]]:
    """Fetch the problems of one split from the hub or its cache. Raises ConfigError when the hub cannot be reached."""
    try:
        path = hf_hub_download(HUB_NAME, f"main/{split}-00000-of-00001.parquet", repo_type="dataset")
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(
            f"{HUB_NAME} must be reachable on the Hugging Face hub, but is not ({type(error).__name__}): "
            "copy it to this machine and name its folder with --source."
        ) from None
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(
        "python -m slipstream.scripts.make_gsm8k_data",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", type=Path, help="folder with the files; by default they come from the hub")
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"), help="folder to write to (data/gsm8k)")
    options = parser.parse_args(arguments)
    rows = {
        ours: [
            convert(problem, index=index, split=ours)
            for index, problem in enumerate(
                read_source(options.source, split=theirs) if options.source else download(theirs)
            )
        ]
        for ours, theirs in SPLITS.items()
    }
    write_pair(options.out, train=rows["train"], heldout=rows["heldout"])


if __name__ == "__main__":
    main()
