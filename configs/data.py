"""Settings of model, prompts, demonstrations, and stored rollouts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError, Positive, Share, require, require_folder
from slipstream.configs.generators import RewardConfig


class LoraConfig(Config):
    """Low-rank adapter, trained, checkpointed, and published instead of the model's weights."""

    rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Rank of the adapter matrices; vLLM serves at most 512."""
    alpha: Positive = 32.0
    """The product of the matrices is scaled by alpha / rank; rsLoRA's scale is alpha x sqrt(rank)."""
    targets: str | Annotated[list[str], Meta(min_length=1)] = "all-linear"
    """Names of adapted layers, or their last parts, such as `[q_proj, v_proj]`; `all-linear` = every linear layer
    except the head and a mixture's experts."""


_RENDERING = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages",
    "return_dict", "tokenize", "tools",
}  # fmt: skip


def require_template_variables(given: Any, *, setting: str) -> None:
    """Raise ConfigError unless `given` is a record without names that rendering sets."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{setting} must be a record of template variables, got {str(given)[:60]!r}.")
    if reserved := sorted(_RENDERING & set(given)):
        raise ConfigError(f"{setting} must hold variables of the template only, got {reserved[0]!r}: remove it.")


class MoeConfig(Config):
    """Settings of models with a mixture of experts."""

    router_replay: bool = False
    """Record which experts the engine selected for each token, and send tokens to the same ones in the learner (routing
    replay, R3)."""
    router_aux_loss: Annotated[float, Meta(ge=0)] | Literal["checkpoint"] = 0.0
    """Coefficient of the load-balancing loss; `checkpoint` = `router_aux_loss_coef` from its config; 0 = off."""


class ModelConfig(Config):
    """The policy: a transformers checkpoint."""

    path: str
    """Folder or hub name of the initial weights and tokenizer, in transformers format, or a GGUF file (`FILE.gguf` or
    `gguf:FILE`), converted once to float32 into a folder of the user's cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type in which the engine computes and weights are sent; the learner keeps float32 master weights."""
    max_length: Annotated[int, Meta(ge=2)] = 2048
    """Maximum length of prompt plus response, tokens; by default `data.max_prompt_tokens` +
    `generators.sampling.max_tokens`."""
    chat_template: str = ""
    """Jinja template file for chat messages, needed on every machine, copied into the final model; empty = the
    tokenizer's."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `{enable_thinking: false}` for Qwen3; a row's `chat_template_kwargs` adds
    to them."""
    trust_remote_code: bool = False
    """Whether code from the checkpoint may run."""
    freeze_vision: bool = False
    """Freeze the visual encoder instead of training it."""
    lora: LoraConfig | None = None
    """Adapter to train on the frozen model (`model.lora.rank=16`); null = train all weights."""
    moe: MoeConfig = MoeConfig()

    def __post_init__(self) -> None:
        require_template_variables(self.chat_template_kwargs, setting="model.chat_template_kwargs")


class ReplayConfig(Config):
    """Training on stored rollouts, `mode=replay`."""

    path: str = ""
    """Local archive folder of a run, such as `runs/mine/archive`; empty in all other modes."""
    rescore: RewardConfig | str | None = None
    """Reward function whose values replace the stored ones: `module:function`, or the fields of `generators.reward`;
    null = train on the stored rewards."""

    def __post_init__(self) -> None:
        require_folder("replay.path", self.path)

    @property
    def reward(self) -> RewardConfig | None:
        """Reward function for rescoring; None keeps the stored rewards."""
        return RewardConfig(function=self.rescore) if isinstance(self.rescore, str) else self.rescore


class TrainFile(Config):
    """One of several files with training prompts."""

    path: str
    """Parquet file, or JSON lines or CSV according to its extension."""
    weight: Positive | None = None
    """Relative share of prompts, regardless of the file's length; null for every file = proportional to rows."""


class CurriculumConfig(Config):
    """Skips prompts with a measured success rate outside `low` to `high`.

    rate = sum over the row's groups of 0.5 ** (later groups) * correct answers / the same sum of all answers
    """

    low: Share = 0.1
    """Lowest success rate to train on; rows below it are too hard."""
    high: Share = 0.9
    """Highest success rate to train on; rows above it are too easy."""
    explore: Share = 0.1
    """Fraction of prompts outside the band to generate anyway, because their success rate changes during training; 0 =
    only if no other prompt is left, 1 = skip none."""
    min_answers: Annotated[int, Meta(ge=1)] = 8
    """Answers needed before a row can be skipped."""

    def __post_init__(self) -> None:
        why = "every row that is measured would lie outside"
        require(self.low < self.high, "data.curriculum.low", f"be < high ({self.high:g})", got=self.low, why=why)


EVAL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,47}\Z"


class EvalSet(Config):
    """Evaluation prompts with their own sampling settings; the accuracy is the metric `eval/accuracy_NAME`."""

    name: Annotated[str, Meta(pattern=EVAL_NAME_PATTERN)]
    """Name in metrics and results, such as `aime_2024`; not `train`."""
    path: str
    """Parquet file, or JSON lines or CSV according to its extension; several sets can share a file."""
    samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Answers per prompt; the accuracy is the mean over all of them."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Divisor of the logits; 0 = greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Probability mass of nucleus sampling; null = as in `generators.sampling`."""
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """Number of most likely tokens to sample from, -1 = all; null = as in `generators.sampling`."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Longest response, tokens; null = as in `generators.sampling`."""

    @property
    def before_key(self) -> str:
        """Key in `summary.json` of the accuracy before training."""
        return "accuracy_before" if self.name == "sampled" else f"accuracy_before_{self.name}"


NAMED_COLUMNS = ("prompt", "ground_truth", "images", "data_source", "agent_name", "response")
"""Fields of a row that `data.columns` can name; `response` is for supervised training and `evaluate --responses`."""


class DataConfig(Config):
    """Prompts: Parquet, JSON lines, or CSV files with a prompt and a reference answer in each row; see
    `docs/data.md`."""

    train: str | list[str | TrainFile] = ""
    """Training prompts, required except by `mode=sft` and evaluations: a file, a list of files, or a list with weights,
    such as `[{path: a.parquet, weight: 2}, {path: b.jsonl, weight: 1}]`."""
    eval: str | list[EvalSet] = ""
    """Evaluation prompts, required except by `mode=sft`, never trained on: a file, answered as the sets `sampled`
    (temperature 1) and `greedy` (temperature 0), or a list of sets with their own settings."""
    columns: dict[str, str] = {}
    """Columns of these files with other names than the common ones, such as `{prompt: query, ground_truth: gold}`;
    `record.field` is a field of a record."""
    max_rows: Annotated[int, Meta(ge=1)] | None = None
    """Rows to train on from the start of each training file, in supervised training too; null = all."""
    max_prompt_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Longest prompt, tokens."""
    on_too_long: Literal["error", "skip"] = "error"
    """Handling of rows with prompts longer than `max_prompt_tokens`, and of demonstrations that are longer than
    `model.max_length` or have an empty response. `error`: stop. `skip`: leave these rows out and log how many."""
    curriculum: CurriculumConfig | None = None
    """Skip prompts that are too easy or too hard according to earlier answers; null = use every row in turn."""

    def __post_init__(self) -> None:
        unknown = next((field for field in self.columns if field not in NAMED_COLUMNS), "")
        why = "all other columns go into extra_info under their own names"
        require(not unknown, "data.columns", f"name columns for {', '.join(NAMED_COLUMNS)}", got=unknown, why=why)
        names = [each.name for each in self.eval_sets]
        require(bool(names), "data.eval", "name a set", got="an empty list", why="nothing would be evaluated")
        unfit = next((name for name in names if name == "train" or names.count(name) > 1), "")
        require(not unfit, "data.eval[].name", "be unique, and not train", got=unfit, why="metrics use these names")
        if isinstance(self.train, str):
            return
        why = "there would be nothing to train on"
        require(bool(self.train), "data.train", "name a file", got="an empty list", why=why)
        paths = [file.path for file in self.train_files]
        repeated = next((path for path in paths if paths.count(path) > 1), "")
        require(not repeated, "data.train", "name each file once", got=f"{repeated} twice", why="give it a weight")
        given = [file.weight is not None for file in self.train_files]
        is_fit, key, got = all(given) or not any(given), "data.train[].weight", f"it for {sum(given)} of {len(given)}"
        why = "without it the share follows from the number of rows"
        require(is_fit, key, "be set for every file or for none", got=got, why=why)

    @property
    def eval_sets(self) -> list[EvalSet]:
        if isinstance(self.eval, list):
            return self.eval
        return [EvalSet("sampled", self.eval), EvalSet("greedy", self.eval, temperature=0.0)]

    def eval_set(self, purpose: str) -> EvalSet | None:
        return next((each for each in self.eval_sets if each.name == purpose), None)

    @property
    def train_files(self) -> list[TrainFile]:
        files = [self.train] if isinstance(self.train, str) else self.train
        return [TrainFile(file) if isinstance(file, str) else file for file in files]


class PrepareStep(Config):
    """A command that creates a required file before the roles start.

    Example: PrepareStep(creates="data/digits/heldout.parquet", module="slipstream.scripts.make_digits_data",
    args=["--digits=5"])
    """

    creates: str
    """Path that it creates; if it exists, the command is skipped."""
    module: str
    """Module run as `python -m MODULE ARGS`."""
    args: list[str] = []
    """Command line arguments of the module."""


class SftConfig(Config):
    """Supervised fine-tuning, `mode=sft`.

    A file (Parquet, CSV, JSON lines) has one of three forms, tried in this order: `token_ids` with `model_mask`;
    `messages`, rendered with the chat template; `prompt` (text or messages) with `response` (text). A file of pairs has
    `prompt`, `chosen`, and `rejected`.
    """

    train_path: str = ""
    """Demonstrations to train on; empty in all other modes."""
    eval_path: str = ""
    """Demonstrations for measuring the held-out loss; empty = none."""
    batch_size: Annotated[int, Meta(ge=1)] = 64
    """Demonstrations per optimizer update, over all ranks."""
    eval_every_steps: Annotated[int, Meta(ge=0)] = 20
    """Steps between two measurements of the held-out loss; 0 = only before and after training."""
    eval_rows: Annotated[int, Meta(ge=1)] | None = None
    """Rows measured, from the start of the held-out file; null = all."""
    objective: Literal["demonstrations", "pairs"] = "demonstrations"
    """`demonstrations`: a policy that writes the responses. `pairs`: a reward model that scores the chosen answer above
    the rejected one."""
