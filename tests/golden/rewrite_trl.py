"""`python -m tests.golden.rewrite_trl`: record TRL 1.16.0's losses and gradients for test_agrees_with_trl.

TRL's trainers compute them from fixed numbers in place of a model, a generator, and reward functions. Padding and tool
tokens hold large values that would show up in every result if they were counted.
"""

import itertools
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import trl
    from accelerate import Accelerator
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.gmpo.gmpo_config import GMPOConfig
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer
except (ImportError, RuntimeError) as reason:
    raise SystemExit(
        f"TRL is not installed ({reason}): `uv pip install --target FOLDER --no-deps trl==1.16.0 accelerate datasets "
        "multiprocess pandas`, then run this with PYTHONPATH=FOLDER."
    ) from reason

GOLDEN = Path(__file__).parent / "trl_1_16.json"
EOS, PAD, ORDINARY, LONGEST, POISON = 1, 0, 5, 6, -7.5
LENGTHS = [3, 1, 4, 2, 2, 5, 1, 3, 1, 2, 4, 2]
"""Model-written tokens of three groups of four."""
TOOLS = [(2, 1), (5, 4)]
"""(sequence, index): two tool tokens precede that token."""
REWARDS = [1.0, 0.0, 0.5, 0.2, -1.0, 2.0, 2.0, 0.0, 0.3, 0.8, 0.1, 0.9]
NONE = math.nan

USUAL = {"scale_rewards": "none", "epsilon_high": 0.28, "loss_type": "grpo", "use_bias_correction_kl": False}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
ENGINE = {"use_vllm": True, "vllm_importance_sampling_correction": True}
BOUNDED = {**ENGINE, "vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.25}
MODE = "vllm_importance_sampling_mode"
UNBOUNDED = {**ENGINE, MODE: "token_truncate", "vllm_importance_sampling_clip_max": 1e9}
LOSSES: dict[str, dict[str, Any]] = {
    **{kind: {"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo")},
    "grpo_scaled": {"scale_rewards": "group"},
    "two_sided": {"delta": 1.4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.5},
    "vespo": {"loss_type": "vespo", **VESPO},
    "vespo_around_generator": {"loss_type": "vespo", **VESPO, **UNBOUNDED},
    "gspo": SEQUENCE,
    "luspo": {"loss_type": "luspo", **SEQUENCE},
    **{
        mode: {**BOUNDED, MODE: mode} for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "off_policy_mask": {**UNBOUNDED, "off_policy_mask_threshold": 0.29},
    "kl": {"beta": 0.1},
    "kl_bias_corrected": {"beta": 0.1, "use_bias_correction_kl": True},
    "kl_masked": {**UNBOUNDED, "off_policy_mask_threshold": 0.29, "beta": 0.1},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.05},
    "together": {**SEQUENCE, **BOUNDED, MODE: "token_truncate", "loss_type": "dapo", "beta": 0.1, "entropy_coef": 0.05},
}
"""Name -> settings in addition to the usual ones."""


class _Given:
    """Stand-in for the parts of a trainer that call a model, a generator, or reward functions."""

    def __init__(self, args: Any, *, batch: dict[str, Any]) -> None:
        self.args = args
        self.accelerator = Accelerator(cpu=True)
        self.model, self.ref_model = _model("start_logprobs"), _model("reference_logprobs")
        self.epsilon_low, self.epsilon_high = args.epsilon, args.epsilon_high or args.epsilon
        self.num_generations_eval = args.num_generations
        self.reward_funcs, self.reward_func_names, self.reward_weights = ["reward"], ["reward"], torch.ones(1)
        self.eos_token_ids, self._tokenizer = [EOS], SimpleNamespace(pad_token_id=PAD)
        self.environment_factories, self.environments, self.tools = None, None, []
        self.aux_loss_enabled = self._is_vlm = False
        self.current_gradient_accumulation_steps = 1
        self._entropy_bonus_enabled = bool(getattr(args, "entropy_coef", 0.0))
        self._metrics, self._pending_metrics, self._pending_extra_logs = {"train": defaultdict(list)}, {}, {}
        self._logs = defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)}
        self._batch = batch
        self.learner = {name: padded(batch, name).requires_grad_() for name in ("learner_logprobs", "entropies")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["args"], name)

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return torch.tensor(self._batch["rewards"])[:, None]

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        if model.name == "learner_logprobs":
            return self.learner["learner_logprobs"], self.learner["entropies"], None
        return padded(self._batch, model.name), torch.zeros(()), None

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        is_cut = self._batch.get("is_truncated", [False] * len(prompts))
        of_tools, rows = written(self._batch), padded(self._batch, "generator_logprobs")
        ends = [ORDINARY if cut else EOS for cut in is_cut]
        answers = [[ORDINARY] * (len(row) - 1) + [end] for row, end in zip(of_tools, ends, strict=True)]
        asked, said = [[ORDINARY]] * len(prompts), [""] * len(prompts)
        if isinstance(self, RLOOTrainer):
            return asked, answers, said
        logprobs = [row[: len(answer)].tolist() for row, answer in zip(rows, answers, strict=True)]
        return asked, answers, of_tools, said, logprobs, {}, None, None


class Grpo(_Given, GRPOTrainer): ...


class Gmpo(_Given, GMPOTrainer): ...


class Rloo(_Given, RLOOTrainer): ...


def _model(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, training=True, is_gradient_checkpointing=False)


def written(batch: dict[str, Any]) -> list[list[int]]:
    """One row per sequence: 1 for model tokens, 0 for tool tokens."""
    rows = [[1] * length for length in LENGTHS]
    for sequence, index in batch.get("tools", TOOLS):
        rows[sequence][index:index] = [0, 0]
    return rows


def is_written(batch: dict[str, Any]) -> Tensor:
    """Mask of model-written tokens [B, T], False in the padding."""
    rows = [torch.tensor(row) for row in written(batch)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).bool()


def padded(batch: dict[str, Any], name: str) -> Tensor:
    """Values of model-written tokens at their indices [B, T], poison elsewhere."""
    places = is_written(batch)
    rows = torch.full(places.shape, POISON)
    rows[places] = torch.tensor(batch[name])
    return rows


def make_batch() -> dict[str, Any]:
    """A batch in which generator, start of the step, and learner are three different policies."""
    torch.manual_seed(16)
    num_tokens = sum(LENGTHS)
    start = -3 * torch.rand(num_tokens) - 0.2
    columns = {
        "generator_logprobs": (start + 0.3 * torch.randn(num_tokens)).clamp(max=-0.01),
        "start_logprobs": start,
        "reference_logprobs": start + 0.5 * torch.randn(num_tokens),
        "learner_logprobs": start + 0.3 * torch.randn(num_tokens),
        "entropies": 2 * torch.rand(num_tokens),
    }
    numbers = {name: [round(value, 3) for value in column.tolist()] for name, column in columns.items()}
    return {"lengths": LENGTHS, "group_size": 4, "longest": LONGEST, "rewards": REWARDS, **numbers}


def loss_and_gradients(
    batch: dict[str, Any], *, kind: type = Grpo, config: type = GRPOConfig, **settings: Any
) -> dict[str, Any]:
    """Loss and gradients of the whole computation, from rewards on, as configured by TRL's own settings record."""
    sizes = {"per_device_train_batch_size": len(LENGTHS), "num_generations": batch["group_size"]}
    usual = {"num_iterations": 2, "gradient_accumulation_steps": 1, "epsilon": 0.2, "beta": 0.0, **sizes}
    machine = {"use_cpu": True, "bf16": False, "report_to": "none", "max_completion_length": LONGEST}
    with tempfile.TemporaryDirectory() as folder:
        args = config(folder, **(machine | usual | settings))
    trainer = kind(args, batch=batch)
    inputs = trainer._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    loss = trainer._compute_loss(_model("learner_logprobs"), inputs)
    leaves = list(trainer.learner.values())
    by_logprob, by_entropy = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    places = is_written(batch)
    assert not by_logprob[~places].any()
    of_entropies = {"entropy_gradient": by_entropy[places]} if by_entropy.any() else {}
    return {"loss": loss, "gradient": by_logprob[places], **of_entropies}


def losses(batch: dict[str, Any]) -> dict[str, Any]:
    """Losses of GRPO variants by name."""
    found = {name: loss_and_gradients(batch, **(USUAL | chosen)) for name, chosen in LOSSES.items()}
    found["gmpo"] = loss_and_gradients(
        batch, kind=Gmpo, config=GMPOConfig, scale_rewards="none", epsilon=0.3, epsilon_high=0.25
    )
    truncated = batch | {"is_truncated": [index in (1, 5) for index in range(len(LENGTHS))]}
    for kind in ("grpo", "dapo"):
        settings = USUAL | {"loss_type": kind, "mask_truncated_completions": True}
        found[f"{kind}_truncated"] = loss_and_gradients(truncated, **settings)
    unscored = batch | {"rewards": [NONE if index == 4 else reward for index, reward in enumerate(REWARDS)]}
    found["grpo_unscored"] = loss_and_gradients(unscored, **USUAL)
    unknown = [NONE if index % 5 == 0 else value for index, value in enumerate(batch["generator_logprobs"])]
    settings = USUAL | LOSSES["sequence_truncate"]
    found["unknown_logprobs"] = loss_and_gradients(batch | {"generator_logprobs": unknown}, **settings)
    fresh = batch | {"learner_logprobs": batch["start_logprobs"], "tools": []}  # RLOOTrainer does not support tools
    for name, beta in (("rloo", 0.0), ("rloo_kl", 0.1)):
        found[name] = loss_and_gradients(fresh, kind=Rloo, config=RLOOConfig, normalize_advantages=False, beta=beta)
    return found


def divergences() -> dict[str, Any]:
    """Divergences between a student and a teacher over a vocabulary of 6, means over 3 of 4 tokens."""
    torch.manual_seed(17)
    student, teacher = (torch.randn(1, 4, 6).mul(1.5).mul(1000).round().div(1000) for _ in range(2))
    labels = torch.tensor([[1, -100, 1, 1]])

    def evaluate(function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        leaf = student.clone().requires_grad_()
        loss = function(leaf)
        return {"loss": loss, "gradient": torch.autograd.grad(loss, leaf)[0][labels != -100]}

    def over_vocabulary(leaf: Tensor, *, beta: float) -> Tensor:
        loss: Tensor = GKDTrainer.generalized_jsd_loss(leaf, teacher, labels=labels, beta=beta)
        return loss

    def over_few(leaf: Tensor, *, beta: float, has_rest: bool) -> Tensor:
        each = compute_topk_self_distillation_loss(
            leaf, teacher, distillation_topk=3, distillation_alpha=beta, distillation_add_tail=has_rest
        )
        return each[labels != -100].mean()

    found: dict[str, Any] = {"student": student[labels != -100], "teacher": teacher[labels != -100]}
    for beta in (0.0, 0.3, 1.0):
        found[f"beta_{beta}"] = evaluate(partial(over_vocabulary, beta=beta))
    for beta, has_rest in itertools.product((0.0, 0.3), (False, True)):
        found[f"top_3_{beta}_{has_rest}"] = evaluate(partial(over_few, beta=beta, has_rest=has_rest))
    return found


def plain(value: Any) -> Any:
    """Convert to JSON types: floats of 9 digits, null for NaN."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return value if not isinstance(value, float) else None if math.isnan(value) else round(value, 9)


def lines(results: dict[str, Any]) -> str:
    """JSON with one line per list."""
    parts = {name: lines(entry) if isinstance(entry, dict) else json.dumps(entry) for name, entry in results.items()}
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "\n}"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    batch = make_batch()
    results = {"trl": trl.__version__, "batch": batch, "losses": losses(batch)}
    GOLDEN.write_text(lines(plain(results | {"divergences": divergences()})) + "\n")
