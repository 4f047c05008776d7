"""Tasks of the comparison, as settings of a run and as input of the peer's side."""

import string
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from slipstream.buffer.trajectory import Reward
from slipstream.configs.load import cache_folder
from slipstream.generators.agents.episode import Episode
from slipstream.generators.rewards.reward import RewardInput
from slipstream.scripts.init_random_model import save_model

PAD, EOS = "<pad>", "<eos>"
TURN_TOKENS = 8
"""Length of each of the two turns around a slow tool."""
LONG_TAIL_MODEL = "models/peers-long-tail"
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation
_HERE = "benchmarks.peers.tasks"


class Task(NamedTuple):
    """A task for both sides. Example: Task("default", reward="position_match", ..., overrides=[...])."""

    name: str
    reward: str
    groups: int
    group_size: int
    max_tokens: int
    learning_rate: float
    steps: int
    experiment: str = "digits_cpu"
    """With its prompts, its model unless `model` names another, and its `prepare` steps."""
    model: str = "models/digits-gpt2-warm"
    train: str = "data/digits/train.parquet"
    source: str = "digits/reverse"
    warmup_steps: int = 10
    schedule: str = "linear"
    prompt_tokens: int = 6
    """On average, with the chat template."""
    goal: float = 2.0
    """Fraction of correct answers over three consecutive steps that ends the measurement; above 1: none."""
    tool_s: float | None = None
    learner_threads: int = 1
    """Threads of our learner; TRL uses one per core. More than one slows down a tiny model."""
    overrides: tuple[str, ...] = ()
    """Additional settings of our side."""

    def settings(self) -> list[str]:
        """Return the settings of a Slipstream run."""
        return [
            f"experiment={self.experiment}",
            f"model.path={self.model}",
            f"generators.group_size={self.group_size}",
            f"generators.sampling.max_tokens={self.max_tokens}",
            f"learner.prompts_per_step={self.groups}",
            f"learner.optimizer.learning_rate={self.learning_rate}",
            f"learner.optimizer.warmup_steps={self.warmup_steps}",
            f"learner.optimizer.schedule={self.schedule}",
            f"learner.max_steps={self.steps}",
            "evaluation.stop=[]",
            "evaluation.every_steps=0",
            "evaluation.num_final_prompts=32",
            *self.overrides,
        ]

    def peer(self, *, threads: int, folder: Path, seed: int) -> dict[str, Any]:
        """Return the same for `trl_side.py`."""
        return {
            "model": self.model,
            "train": self.train,
            "reward": self.reward,
            "groups": self.groups,
            "group_size": self.group_size,
            "max_tokens": self.max_tokens,
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "schedule": self.schedule,
            "steps": self.steps,
            "seed": seed,
            "threads": threads,
            "tool_s": self.tool_s,
            "turn_tokens": TURN_TOKENS,
            "folder": str(folder),
        }


def _tool_task(name: str, tool_s: float, *, steps: int) -> Task:
    return Task(
        name,
        reward="digit_share",
        groups=32,
        group_size=8,
        max_tokens=2 * TURN_TOKENS + 1,
        learning_rate=1e-6,
        steps=steps,
        tool_s=tool_s,
        overrides=(
            f"generators.reward.function={_HERE}:digit_share",
            "generators/agent=custom",
            f"generators.agent.function={_HERE}:call_tool",
            f"generators.agent.arguments={{seconds: {tool_s}}}",
            "model.max_length=64",
            # As many as the lag allows: a request that waits for a tool takes no slot in the engine.
            "generators.max_concurrency=1280",
        ),
    )


TASKS = {
    task.name: task
    for task in (
        Task(
            "default",
            reward="position_match",
            groups=32,
            group_size=8,
            max_tokens=8,
            learning_rate=3e-3,
            steps=80,
            goal=0.9,
        ),
        Task(
            "long tail",
            reward="digit_share",
            groups=16,
            group_size=8,
            max_tokens=256,
            learning_rate=1e-6,
            steps=8,
            model=LONG_TAIL_MODEL,
            # The learner is the bottleneck.
            learner_threads=2,
            overrides=(
                f"generators.reward.function={_HERE}:digit_share",
                "model.max_length=288",
                "learner.tokens_per_microbatch=4096",
            ),
        ),
        Task(
            "real model",
            experiment="smollm2_cpu",
            reward="last_number",
            groups=16,
            group_size=4,
            max_tokens=12,
            learning_rate=1e-5,
            warmup_steps=2,
            steps=24,
            goal=0.8,
            model=str(cache_folder("smollm2-135m-instruct")),
            train="data/sums/train.parquet",
            source="digits/question",
            prompt_tokens=29,
            schedule="constant",
            learner_threads=2,
        ),
        _tool_task("tool 0.08 s", 0.08, steps=30),
        _tool_task("tool 1 s", 1.0, steps=15),
    )
}


def digit_share(sample: RewardInput) -> Reward:
    """Fraction of digits: a reward that differs between answers and hardly affects their length."""
    return Reward(total=sum(map(str.isdigit, sample.response)) / max(1, len(sample.response)))


async def call_tool(episode: Episode, *, seconds: float) -> None:
    """Agent loop: a turn, a tool call, a turn."""
    import asyncio

    await episode.generate(max_tokens=TURN_TOKENS)
    await asyncio.sleep(seconds)
    episode.observe("=")
    await episode.generate(max_tokens=TURN_TOKENS)


def save_long_tail_model(folder: Path) -> None:
    """Write a random Qwen2 of 3.3 million parameters with 96 tokens, one of which ends a response.

    Its response lengths are approximately geometric.
    """
    characters = [character for character in _CHARACTERS if character not in "<>"]
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    tokenizer = Qwen2Tokenizer(vocabulary, [], unk_token=PAD, pad_token=PAD, eos_token=EOS)
    save_model(folder, model=model, tokenizer=tokenizer)
