"""TRL's GRPOTrainer on a task of benchmarks.peers. Runs in TRL's environment and imports nothing from Slipstream.

    FOLDER/bin/python benchmarks/peers/trl_side.py task.json result.json

A slow tool is called for all answers of a batch at once, the best that a synchronous trainer can do.
"""

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def position_match(answer: str, truth: str, *, is_ended: bool) -> float:
    """Fraction of matching positions, counting the end as a position."""
    is_end_right = is_ended and len(answer) == len(truth)
    matches = sum(a == t for a, t in zip(answer, truth, strict=False)) + is_end_right
    return matches / (max(len(answer), len(truth)) + 1)


def digit_share(answer: str, truth: str, *, is_ended: bool) -> float:
    """Fraction of digits: a reward that differs between answers and hardly affects their length."""
    return sum(character.isdigit() for character in answer) / max(1, len(answer))


def last_number(answer: str, truth: str, *, is_ended: bool) -> float:
    """1 if the last number is right, minus 1 if the answer was cut off."""
    numbers = re.findall(r"\d+", answer)
    return float(numbers[-1:] == [truth]) - (not is_ended)


REWARDS = {"position_match": position_match, "digit_share": digit_share, "last_number": last_number}


def text_of(completion: Any) -> str:
    """The answer to a chat prompt is a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class Recorder(TrainerCallback):
    """Records time and its parts, tokens, and the fraction of correct answers at the end of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.num_tokens, self.num_correct, self.num_answers = 0, 0, 0
        self._started_at = self._began_at = self._trained_at = self.scored_at = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started_at = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began_at = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trained_at = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now, accuracy = time.perf_counter(), self.num_correct / max(1, self.num_answers)
        row = {
            "step": state.global_step,
            "time_s": now - self._started_at,
            "generate_s": self.scored_at - self._began_at,
            "passes_s": self._trained_at - self.scored_at,
            "optimizer_s": now - self._trained_at,
        }
        self.rows.append({**row, "tokens": float(self.num_tokens), "accuracy": accuracy})
        self.num_tokens, self.num_correct, self.num_answers = 0, 0, 0


def make_rollout(task: dict[str, Any]) -> Any:
    """Build a rollout: a turn, a tool of `tool_s` seconds for all answers at once, another turn."""

    def generate(trainer: Any, contexts: list[list[int]], max_tokens: int) -> list[list[int]]:
        longest = max(map(len, contexts))
        ids = torch.tensor([[0] * (longest - len(context)) + context for context in contexts])
        mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
        end = trainer.processing_class.eos_token_id
        config = GenerationConfig(do_sample=True, max_new_tokens=max_tokens, eos_token_id=end, pad_token_id=0, top_k=0)
        with torch.inference_mode():
            found = trainer.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        answers = found[:, longest:].tolist()
        return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]

    async def call_tools(count: int) -> None:
        await asyncio.gather(*(asyncio.sleep(task["tool_s"]) for _ in range(count)))

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        prompt_ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        observation = tokenizer.encode("=", add_special_tokens=False)
        first = generate(trainer, prompt_ids, task["turn_tokens"])
        asyncio.run(call_tools(len(prompts)))
        contexts = [p + a + observation for p, a in zip(prompt_ids, first, strict=True)]
        second = generate(trainer, contexts, task["turn_tokens"])
        answers = [a + observation + b for a, b in zip(first, second, strict=True)]
        mask = [[1] * len(a) + [0] * len(observation) + [1] * len(b) for a, b in zip(first, second, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": None, "env_mask": mask}

    return rollout


def main() -> None:
    """Train with the task's settings and write the recorded rows."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    rows = load_dataset("parquet", data_files=task["train"], split="train").to_list()
    dataset = Dataset.from_list([{"prompt": r["prompt"], "truth": r["reward_model"]["ground_truth"]} for r in rows])
    recorder, score = Recorder(), REWARDS[task["reward"]]

    def reward(completions: list[Any], completion_ids: list[list[int]], truth: list[str], **_: Any) -> Any:
        rewards = [
            score(text_of(answer), right, is_ended=bool(ids) and ids[-1] == tokenizer.eos_token_id)
            for answer, ids, right in zip(completions, completion_ids, truth, strict=True)
        ]
        recorder.num_tokens += sum(map(len, completion_ids))
        recorder.num_correct += sum(given == 1.0 for given in rewards)
        recorder.num_answers += len(rewards)
        recorder.scored_at = time.perf_counter()
        return rewards

    config = GRPOConfig(
        output_dir=task["folder"],
        per_device_train_batch_size=task["groups"] * task["group_size"],
        num_generations=task["group_size"],
        max_completion_length=task["max_tokens"],
        temperature=1.0,
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant_with_warmup" if task["schedule"] == "constant" else task["schedule"],
        warmup_steps=task["warmup_steps"],
        max_steps=task["steps"],
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        seed=task["seed"],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[recorder],
        rollout_func=make_rollout(task) if task["tool_s"] is not None else None,
    )
    trainer.train()
    Path(sys.argv[2]).write_text(json.dumps(recorder.rows))


if __name__ == "__main__":
    main()
