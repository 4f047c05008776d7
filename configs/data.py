"""Model, prompts, demonstrations and stored rollouts."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, require, require_folder
from slipstream.configs.generators import RewardConfig


class LoraConfig(Config):
    """A low-rank adapter, which is trained, checkpointed and published in place of the model's own weights."""

    rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Rank of the adapter's matrices; 512 is the largest that vLLM serves."""
    alpha: Annotated[float, Meta(gt=0)] = 32.0
    """The product of the matrices is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which keeps the size of updates alike over ranks."""
    targets: str | Annotated[list[str], Meta(min_length=1)] = "all-linear"
    """Names of the layers that get an adapter, or their last parts, such as `[q_proj, v_proj]`; `all-linear` = every
    linear layer but the head and a mixture's experts."""


class ModelConfig(Config):
    """The policy: a transformers checkpoint."""

    path: str
    """Folder or hub name of initial weights and tokenizer, in transformers format."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type in which engines compute and weights travel; the learner keeps float32 master weights."""
    max_length: Annotated[int, Meta(ge=2)] = 64
    """Longest prompt and response together, tokens."""
    chat_template: str = ""
    """File of a Jinja template for chat messages, on every machine; it goes into the final model, too. Empty = the
    tokenizer's own."""
    trust_remote_code: bool = False
    """Whether code that comes with the checkpoint may run."""
    freeze_vision: bool = False
    """Whether the visual encoder of a model that is given images stays as it is; else it is trained with the rest."""
    lora: LoraConfig | None = None
    """Adapter to train on top of the model, which stays as it is: `model.lora.rank=16`; null = all weights are
    trained."""
    router_replay: bool = False
    """Mixtures of experts: engines record the experts that they chose for each token, and the learner's forward passes
    use those instead of its own choice; the weights of the experts are the learner's own."""
    router_aux_loss: Annotated[float, Meta(ge=0)] | Literal["checkpoint"] = 0.0
    """Coefficient of the loss that balances a mixture's experts; `checkpoint` = the `router_aux_loss_coef` of the
    checkpoint's config. 0 = off."""


class ReplayConfig(Config):
    """Training from stored rollouts, `mode=replay`."""

    path: str = ""
    """Archive folder of a run, such as `runs/mine/archive`, on this machine; empty in every other mode."""
    rescore: RewardConfig | str | None = None
    """Reward that replaces the stored ones: `module:function`, or a record with the fields of `generators.reward`. null
    = the stored rewards."""

    def __post_init__(self) -> None:
        require_folder("replay.path", self.path)

    @property
    def reward(self) -> RewardConfig | None:
        """Reward function that rescores stored trajectories; None keeps the stored rewards."""
        return RewardConfig(function=self.rescore) if isinstance(self.rescore, str) else self.rescore


class TrainFile(Config):
    """One of several files of prompts to train on."""

    path: str
    """Parquet, or JSON lines by its name."""
    weight: Annotated[float, Meta(gt=0)] | None = None
    """Relative share of prompts that come from this file, whatever its length; null for every file = by their rows."""


class CurriculumConfig(Config):
    """Prompts by measured difficulty: those whose row's success rate lies outside `low` to `high` are skipped.

    rate = sum over the row's groups of decay ** (groups measured after it) * right answers / the same of all answers
    """

    low: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Smallest success rate that is trained on; below it, a row is too hard."""
    high: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """Largest success rate that is trained on; above it, a row is too easy."""
    explore: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the prompts outside that are generated all the same, so that their rows are measured again; 0 = only
    where no other row is left, 1 = rows are measured and none is skipped."""
    decay: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Factor on the weight of a row's earlier answers for each later group; 0 = the newest alone, 1 = all alike."""
    min_answers: Annotated[int, Meta(ge=1)] = 8
    """Scored answers from which a row's success rate counts; with fewer it is never skipped."""

    def __post_init__(self) -> None:
        why = "every row that is measured would lie outside"
        require(self.low < self.high, "data.curriculum.low", f"be < high ({self.high:g})", got=self.low, why=why)


class HeldoutSet(Config):
    """Prompts for evaluation, with the sampling of their answers; its accuracy is the metric `eval/accuracy_NAME`."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,47}\Z")]
    """Name in metrics and results, such as `aime_2024`; never `train`."""
    path: str
    """Parquet, or JSON lines by its name; several sets may share a file."""
    samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Answers to each prompt; the accuracy is the mean over all of them."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Divisor of the logits; 0 = the most likely token each time."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Probability mass of nucleus sampling; null = that of `generators.sampling`."""
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """Most likely tokens that may be sampled, -1 = all; null = that of `generators.sampling`."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Longest response, tokens; null = that of `generators.sampling`."""

    @property
    def before_key(self) -> str:
        """Key of the accuracy before training in `summary.json`."""
        return "accuracy_before" if self.name == "sampled" else f"accuracy_before_{self.name}"


class DataConfig(Config):
    """Prompts: files of Parquet or JSON lines, with `prompt` and `reward_model.ground_truth` or `question` and `answer`
    in each row; see `docs/data.md`."""

    train: str | list[TrainFile]
    """Prompts to train on: a file, or a list of them with weights, such as `[{path: a.parquet, weight: 2}, {path:
    b.jsonl, weight: 1}]`."""
    heldout: str | list[HeldoutSet]
    """Prompts for evaluation, never trained on. A file is answered twice, as the sets `sampled` (temperature 1) and
    `greedy` (temperature 0); a list of sets has names and settings of its own."""
    max_prompt_tokens: Annotated[int, Meta(ge=1)] = 32
    """Longest prompt, tokens."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of a file with longer prompts when it is read: it is refused, or its other rows are used; how many are
    left out is logged."""
    curriculum: CurriculumConfig | None = None
    """Skipping of prompts that are too easy or too hard by the answers so far; null = every row in its turn."""

    def __post_init__(self) -> None:
        names = [each.name for each in self.heldout_sets]
        require(bool(names), "data.heldout", "name a set", got="an empty list", why="nothing would be evaluated")
        unfit = next((name for name in names if name == "train" or names.count(name) > 1), "")
        require(not unfit, "data.heldout[].name", "be unique, and not train", got=unfit, why="metrics bear these names")
        if isinstance(self.train, str):
            return
        require(bool(self.train), "data.train", "name a file", got="an empty list", why="there is nothing to train on")
        paths = [file.path for file in self.train]
        repeated = next((path for path in paths if paths.count(path) > 1), "")
        require(not repeated, "data.train", "name each file once", got=f"{repeated} twice", why="give it a weight")
        given = [file.weight is not None for file in self.train]
        require(
            all(given) or not any(given),
            "data.train[].weight",
            "be set for every file or for none",
            got=f"it for {sum(given)} of {len(given)}",
            why="without it the share follows from the number of rows",
        )

    @property
    def heldout_sets(self) -> list[HeldoutSet]:
        if isinstance(self.heldout, list):
            return self.heldout
        return [HeldoutSet("sampled", self.heldout), HeldoutSet("greedy", self.heldout, temperature=0.0)]

    def heldout_set(self, purpose: str) -> HeldoutSet | None:
        """Set of this name; None for training."""
        return next((each for each in self.heldout_sets if each.name == purpose), None)

    @property
    def train_files(self) -> list[TrainFile]:
        return [TrainFile(self.train)] if isinstance(self.train, str) else self.train


class PrepareStep(Config):
    """A command that creates a file the run needs, run once before the roles start.

    Example: PrepareStep(creates="data/digits/heldout.parquet", module="slipstream.scripts.make_digits_data",
    args=["--digits=5"])
    """

    creates: str
    """Path that the command creates; the command is skipped when it exists."""
    module: str
    """Module to run as `python -m MODULE ARGS`."""
    args: list[str] = []
    """Command line arguments of the module."""


class SftConfig(Config):
    """Supervised fine-tuning, `mode=sft`.

    A Parquet file has one of three forms, tried in this order: `token_ids` with `model_mask`; `messages`, through the
    tokenizer's chat template; `prompt` (text or messages) with `response` (text). One of pairs has `prompt`, `chosen`
    and `rejected`.
    """

    train_path: str = ""
    """Demonstrations to train on; empty in every other mode."""
    heldout_path: str = ""
    """Demonstrations on which the loss is measured; empty = none."""
    prompt: str = "prompt"
    """Column of the prompts; `record.field` for a field of a record."""
    response: str = "response"
    """Column of the responses to prompts, likewise; an end token is appended to each."""
    unfit: Literal["refuse", "skip"] = "refuse"
    """Treatment of a row with an empty response, or longer than `model.max_length`; skipped rows are counted."""
    trajectories_per_step: Annotated[int, Meta(ge=1)] = 64
    """Demonstrations of one optimizer update, over all ranks."""
    epochs: Annotated[int, Meta(ge=1)] | None = None
    """Passes over the training file; null = `learner.max_steps` steps, however many passes that is."""
    heldout_every_steps: Annotated[int, Meta(ge=0)] = 20
    """Steps between two measurements of the held-out loss; 0 = only before and after training."""
    heldout_rows: Annotated[int, Meta(ge=1)] | None = None
    """Number of first rows of the held-out file that are measured; null = all."""
    objective: Literal["demonstrations", "pairs"] = "demonstrations"
    """`demonstrations`: the policy learns to write the responses. `pairs`: a reward model learns to score the chosen
    answer above the rejected one."""
