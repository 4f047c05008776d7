"""Translate settings of TRL 1.16's GRPO trainers, with the defaults of its `GRPOConfig`."""

from math import ceil
from typing import Any

from slipstream.configs.base import ConfigError
from slipstream.migration.translation import Imported, Translation

_DEFAULTS: dict[str, Any] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "beta": 0.0,
    "bf16": True,
    "epsilon": 0.2,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "importance_sampling_level": "token",
    "learning_rate": 1e-6,
    "loss_type": "dapo",
    "lr_scheduler_type": "linear",
    "max_completion_length": 512,
    "max_grad_norm": 1.0,
    "num_generations": 8,
    "num_iterations": 1,
    "num_processes": 1,
    "per_device_train_batch_size": 8,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "save_steps": 500,
    "scale_rewards": "group",
    "seed": 42,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "vespo_k_neg": 3.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_neg": 2.0,
    "vespo_lambda_pos": 3.0,
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "weight_decay": 0.0,
}
_NAMES = {*_DEFAULTS, "model_name_or_path", "dataset_name", "output_dir", "max_steps", "use_vllm"}
_DECIDED_HERE = (
    "vllm_server",
    "vllm_group_port",
    "vllm_mode",
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "use_vllm",
    "dataloader_",
    "ddp_",
    "ds3_",
    "fsdp",
    "deepspeed",
    "disable_dropout",
    "log_",
    "logging_",
    "push_to_hub",
    "hub_",
    "remove_unused_columns",
    "report_to",
    "torch_dtype",
    "tf32",
    "use_liger",
    "attn_implementation",
    "overwrite_output_dir",
    "save_strategy",
    "do_",
    "distributed_type",
    "machine_rank",
    "mixed_precision",
    "num_machines",
)
"""Prefixes of keys that need no equivalent: Slipstream decides these itself, or they configure TRL's reporting."""
_AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "sapo": "seq_mean_token_mean",
    "vespo": "token_mean",
}
"""loss_type -> algorithm.aggregation."""


def import_trl(given: dict[str, Any]) -> Imported:
    """Translate settings of GRPOConfig, AsyncGRPOConfig, or `trl grpo --config`. Raises ConfigError."""
    if not _NAMES & given.keys():
        raise ConfigError("FILE must hold settings of TRL's GRPO, such as num_generations, got none of them.")
    settings = Translation(given, _DEFAULTS)
    for translate in (_model, _batch, _objective, _correction, _optimizer, _generation, _staleness, _schedule):
        translate(settings)
    return settings.result(decided_here=_DECIDED_HERE)


def _model(settings: Translation) -> None:
    settings.same("model_name_or_path", "model.path")
    settings.same("trust_remote_code", "model.trust_remote_code")
    dtype = settings.take("dtype") or ("bfloat16" if settings.take("bf16") else "float32")
    settings.put("model.dtype", dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16")
    settings.same("gradient_checkpointing", "learner.engine.gradient_checkpointing")
    if settings.take("use_peft"):
        settings.put("model.lora.rank", settings.take("lora_r") or 16)
        settings.put("model.lora.alpha", float(settings.take("lora_alpha") or 32))
        settings.same("lora_target_modules", "model.lora.targets")
        settings.same("use_rslora", "model.lora.rslora")
    response = settings.take("max_completion_length")
    prompt = settings.take("max_prompt_length") or settings.take("vllm_max_model_length") or 2 * response
    prompt = prompt if settings.given.get("max_prompt_length") or prompt <= response else prompt - response
    settings.put("data.max_prompt_tokens", prompt)
    settings.put("generators.sampling.max_tokens", response)
    settings.leave_default_task(max_length=prompt + response, tokens_per_microbatch=16384)
    settings.note("dataset_name", "name its rows as files: data.train=FILE, data.heldout=FILE (docs/data.md).")


def _batch(settings: Translation) -> None:
    size, ranks = settings.take("num_generations"), settings.take("num_processes")
    per_update = settings.take("per_device_train_batch_size") * settings.take("gradient_accumulation_steps") * ranks
    accumulation = settings.take("gradient_accumulation_steps")
    generated = settings.take("generation_batch_size")
    if generated is None:
        generated = per_update * (settings.take("steps_per_generation") or accumulation) // accumulation
    if generated % size:
        raise ConfigError(
            f"num_generations must divide the samples of a batch, as TRL demands, got {size} and {generated}."
        )
    settings.put("generators.group_size", size)
    settings.put("learner.groups_per_step", generated // size)
    settings.put("learner.num_ranks", ranks)
    if generated > per_update:
        settings.put("algorithm.updates_per_step", generated // per_update)
    if settings.take("num_iterations") > 1:
        settings.note("num_iterations", "a step passes over its batch once; buffer.reuse.max_uses trains again later.")


def _objective(settings: Translation) -> None:
    kind, level = settings.take("loss_type"), settings.take("importance_sampling_level")
    low, high = settings.take("epsilon"), settings.take("epsilon_high")
    clip = {"clip_low": low, "clip_high": low if high is None else high}
    loss: dict[str, Any] = {"kind": "ppo_clip"} | clip | {"dual_clip": settings.take("delta")}
    if kind == "cispo":
        loss = {"kind": "cispo", "clip_high": high or low}
    elif kind == "sapo":
        positive, negative = settings.take("sapo_temperature_pos"), settings.take("sapo_temperature_neg")
        loss = {"kind": "sapo", "tau_positive": positive, "tau_negative": negative}
    elif kind == "vespo":
        names = {"k_pos": "power_positive", "lambda_pos": "decay_positive"}
        names |= {"k_neg": "power_negative", "lambda_neg": "decay_negative"}
        loss = {"kind": "vespo"} | {ours: settings.take(f"vespo_{theirs}") for theirs, ours in names.items()}
    elif level == "sequence":
        loss = {"kind": "gspo"} | clip
    settings.put("algorithm/policy_loss", loss.pop("kind"))
    for field, value in loss.items():
        settings.put(f"algorithm.policy_loss.{field}", value)
    if kind not in _AGGREGATIONS:
        settings.notes.append(f"loss_type={kind}: there is no such loss; ppo_clip with token_mean stands for it.")
    is_sequence = level == "sequence" and kind not in ("cispo", "sapo", "vespo")
    settings.put(
        "algorithm.aggregation", "seq_mean_token_mean" if is_sequence else _AGGREGATIONS.get(kind, "token_mean")
    )
    scale = str(settings.take("scale_rewards")).lower()
    settings.put("algorithm/advantage", {"none": "dr_grpo", "false": "dr_grpo", "batch": "lite_ppo"}.get(scale, "grpo"))
    settings.put("algorithm.masks", [])
    settings.put("algorithm.entropy_coefficient", float(settings.take("entropy_coef") or 0))
    settings.put("algorithm.reward.truncated", "mask" if settings.take("mask_truncated_completions") else None)
    if (beta := settings.take("beta")) > 0:
        settings.put("algorithm.kl.coefficient", float(beta))
        is_corrected = settings.take("use_bias_correction_kl") is not False
        settings.put("algorithm.kl.estimator", "k3_off_policy" if is_corrected else "k3")
        if settings.take("sync_ref_model"):
            settings.same("ref_model_sync_steps", "algorithm.kl.refresh_every_steps")
            settings.note("ref_model_mixup_alpha", "the reference becomes the learner's weights, without a mixture.")
    if weights := settings.take("reward_weights"):
        settings.notes.append(
            f"reward_weights={weights}: list the functions with these weights in generators.reward.functions."
        )
    settings.note("top_entropy_quantile", "there is no mask by entropy: all tokens are trained on.")


def _correction(settings: Translation) -> None:
    mode, cap = settings.take("vllm_importance_sampling_mode"), settings.take("vllm_importance_sampling_cap")
    high = cap or settings.take("vllm_importance_sampling_clip_max")
    low = settings.take("vllm_importance_sampling_clip_min")
    settings.put("algorithm/correction", "none")
    if settings.take("vllm_importance_sampling_correction") and settings.take("use_vllm"):
        level, _, bound = mode.partition("_")
        settings.put("algorithm.correction.level", level)
        settings.put("algorithm.correction.high", float(high))
        settings.put("algorithm.correction.low", low)
        settings.put("algorithm.correction.bound", bound)


def _optimizer(settings: Translation) -> None:
    settings.same("learning_rate", "learner.optimizer.learning_rate", float)
    settings.put("learner.optimizer.betas", [settings.take("adam_beta1"), settings.take("adam_beta2")])
    settings.same("adam_epsilon", "learner.optimizer.epsilon", float)
    settings.same("weight_decay", "learner.optimizer.weight_decay", float)
    settings.same("max_grad_norm", "learner.optimizer.max_grad_norm", float)
    schedule = settings.take("lr_scheduler_type")
    ours = "constant" if schedule == "constant_with_warmup" else schedule
    if ours in ("constant", "linear", "cosine"):
        settings.put("learner.optimizer.schedule", ours)
    else:
        settings.notes.append(f"lr_scheduler_type={schedule}: there are constant, linear and cosine.")
    steps, ratio = settings.take("warmup_steps"), settings.take("warmup_ratio")
    total = settings.take("max_steps")
    if not steps and ratio and total and total > 0:
        steps = int(ratio * total)
    settings.put("learner.optimizer.warmup_steps", ceil((steps or 0) / _updates_per_step(settings)))


def _updates_per_step(settings: Translation) -> int:
    """Return TRL's optimizer updates per generated batch, which is Slipstream's step."""
    size = settings.take("steps_per_generation") or settings.take("gradient_accumulation_steps")
    return max(1, size // settings.take("gradient_accumulation_steps"))


def _generation(settings: Translation) -> None:
    settings.same("temperature", "generators.sampling.temperature", float)
    settings.same("top_p", "generators.sampling.top_p", float)
    settings.put("generators.sampling.top_k", settings.take("top_k") or -1)
    settings.same("vllm_gpu_memory_utilization", "generators.engine.gpu_memory_utilization")
    settings.same("vllm_tensor_parallel_size", "generators.engine.tensor_parallel_size")
    settings.note("max_tool_calling_iterations", "choose generators/agent=tools, and set generators.agent.max_turns.")
    settings.put(
        "generators/engine", "vllm_gpu_shared" if settings.given.get("vllm_mode") == "colocate" else "vllm_gpu"
    )
    settings.put("learner/engine", "deepspeed_zero2")
    settings.put("learner.device", "cuda")
    settings.notes.append(
        "rewards are functions in the training script: generators.reward.function=FILE.py:NAME accepts TRL's signature "
        "unchanged (docs/rewards.md)."
    )


def _staleness(settings: Translation) -> None:
    lag = settings.take("max_staleness")
    settings.put("buffer.staleness.max_lag", lag or 0)
    settings.same("weight_sync_steps", "weights.publish_every_steps")
    if lag is None:
        settings.notes.append(
            "buffer.staleness.max_lag=0 is the synchronous training of GRPOTrainer: raise it, with a correction, to "
            "let generation and training overlap."
        )


def _schedule(settings: Translation) -> None:
    total = settings.take("max_steps")
    updates = _updates_per_step(settings)
    if total and total > 0:
        settings.put("learner.max_steps", max(1, total // updates))
    else:
        settings.notes.append("num_train_epochs: set learner.max_steps to rows / groups_per_step * epochs.")
    settings.take("num_train_epochs")
    settings.same("seed", "seed")
    settings.same("save_steps", "learner.checkpoint.every_steps", lambda steps: max(1, int(steps) // updates))
    settings.same("save_total_limit", "learner.checkpoint.keep")
    every = settings.take("eval_steps")
    settings.put("evaluation.every_steps", int(every) if every and every >= 1 else None)
    settings.take("eval_strategy")
    settings.same("run_name", "name", lambda name: str(name).replace("/", "_"))
    settings.note("output_dir", "runs lie in runs_dir/NAME.")
