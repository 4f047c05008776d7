"""Distance of runs' final models from their initial ones, and their entropy, on answers to held-out prompts.

Each final model samples answers at temperature 1 from the whole vocabulary, at most as long as in its run. At each
position of an answer, KL(final || initial) and entropy are exact sums over the vocabulary, in nats. The program prints
means over positions and answers. The initial model is `model.path` of the run; prompts are the first of `data.eval`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.harness import make_parser, make_table, write_result
from slipstream.broker.dataset import read_heldout
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig, read_config
from slipstream.generators.errors import EngineError, PromptError
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer
from slipstream.runtime.command_line import fail_cleanly

_COLUMNS = {
    "run": "{run}",
    "answers": "{answers}",
    "tokens": "{tokens:.1f}",
    "KL per token": "{kl_per_token:.3f}",
    "KL per answer": "{kl_per_answer:.2f}",
    "entropy": "{entropy:.3f}",
}
_BATCH = 12

console = Console(width=120, highlight=False)


@fail_cleanly(EngineError, PromptError)
def main(arguments: argparse.Namespace) -> None:
    """Measure one run after the other, and print a table."""
    rows: list[dict[str, Any]] = []
    for folder in arguments.runs:
        rows.append({"run": folder.name, **measure(folder, arguments)})
        write_result(arguments, {"runs": rows})
    console.print(make_table(rows, _COLUMNS))


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return means over sampled answers: tokens, KL in nats, entropy in nats per token. Raises ConfigError."""
    config, last = read_config(folder), folder / "final_model"
    if not last.is_dir():
        raise ConfigError(f"{folder} must be a finished run, but has no final_model: pass one that made its last step.")
    initial, final = _load(config.model.path), _load(str(last))
    tokenizer = load_tokenizer(config.model)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    prompts = [ids for ids in _encode(config, tokenizer, most=arguments.prompts) for _ in range(arguments.samples)]
    torch.manual_seed(arguments.seed)
    total = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(prompts), _BATCH):
        given = tokenizer.pad({"input_ids": prompts[start : start + _BATCH]}, return_tensors="pt")
        total += _drift(final, initial, given, tokenizer, max_tokens=config.generators.sampling.max_tokens)
    kl, entropy, tokens = total.tolist()
    answers = len(prompts)
    per_token = {"kl_per_token": kl / tokens, "entropy": entropy / tokens}
    return {"answers": answers, "tokens": tokens / answers, "kl_per_answer": kl / answers, **per_token}


def _load(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _encode(config: RunConfig, tokenizer: Any, *, most: int) -> list[list[int]]:
    """First held-out prompts, as generators encode them."""
    variables = config.model.chat_template_kwargs
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=config.data.max_prompt_tokens, template_variables=variables)
    dataset = next(iter(read_heldout(config).values()))
    return [encoder.encode(dataset.row(index))[0] for index in range(min(most, len(dataset)))]


@torch.inference_mode()
def _drift(final: Any, initial: Any, given: Any, tokenizer: Any, *, max_tokens: int) -> Tensor:
    """Sums over the answers' positions of KL and entropy, and the number of positions, [3]."""
    ends, width = tokenizer.eos_token_id, given.input_ids.shape[1]
    options = {"max_new_tokens": max_tokens, "eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
    tokens = final.generate(**given, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **options)
    is_end = tokens[:, width:] == ends
    # An answer includes the token that ends it.
    is_answer = is_end.cumsum(1) - is_end.int() == 0
    mask = torch.cat([given.attention_mask, is_answer.long()], dim=1)
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    last, first = (model(**inputs).logits[:, width - 1 : -1].log_softmax(-1) for model in (final, initial))
    kl, entropy = (last.exp() * (last - first)).sum(-1), -(last.exp() * last).sum(-1)
    return torch.stack([(kl * is_answer).sum(), (entropy * is_answer).sum(), is_answer.sum()]).double()


if __name__ == "__main__":
    parser = make_parser("benchmarks.staleness.drift", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of finished runs")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts at most")
    parser.add_argument("--samples", type=int, default=2, help="answers per prompt")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
