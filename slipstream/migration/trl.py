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
    "vllm_server", "vllm_group_port", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "use_vllm",
    "dataloader_", "ddp_", "ds3_", "fsdp", "deepspeed", "disable_dropout", "log_", "logging_", "push_to_hub", "hub_",
    "remove_unused_columns", "report_to", "torch_dtype", "tf32", "use_liger", "attn_implementation",
    "overwrite_output_dir", "save_strategy", "do_", "distributed_type", "machine_rank", "mixed_precision",
    "num_machines",
)  # fmt: skip
"""Prefixes of keys that Slipstream decides itself, or about reporting."""
_AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "sapo": "seq_mean_token_mean",
    "vespo": "token_mean",
}
"""loss_type -> algorithm.loss_aggregation."""


def import_trl(given: dict[str, Any]) -> Imported:
    """Translate settings of GRPOConfig, AsyncGRPOConfig, or `trl grpo --config`. Raises ConfigError."""
    if not _NAMES & given.keys():
        raise ConfigError("FILE must hold settings of TRL's GRPO, such as num_generations, got none of them.")
    config = Translation(given, _DEFAULTS)
    for translate in (_model, _batch, _objective, _correction, _optimizer, _generation, _schedule):
        translate(config)
    return config.result(decided_here=_DECIDED_HERE)


def _model(config: Translation) -> None:
    config.same("model_name_or_path", "model.path")
    config.same("trust_remote_code", "model.trust_remote_code")
    dtype = config.take("dtype") or ("bfloat16" if config.take("bf16") else "float32")
    config.put("model.dtype", dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16")
    config.same("gradient_checkpointing", "learner.engine.gradient_checkpointing")
    if config.take("use_peft"):
        config.put("model.lora.rank", config.take("lora_r") or 16)
        config.put("model.lora.alpha", float(config.take("lora_alpha") or 32))
        config.same("lora_target_modules", "model.lora.targets")
        config.same("use_rslora", "model.lora.rslora")
    response = config.take("max_completion_length")
    prompt = config.take("max_prompt_length") or config.take("vllm_max_model_length") or 2 * response
    prompt = prompt if config.given.get("max_prompt_length") or prompt <= response else prompt - response
    config.put("data.max_prompt_tokens", prompt)
    config.put("generators.sampling.max_tokens", response)
    config.put("model.max_length", prompt + response)
    config.put("learner.tokens_per_microbatch", max(prompt + response, 16384))
    config.note("dataset_name", "name its rows as files: data.train=FILE, data.eval=FILE (docs/data.md).")


def _batch(config: Translation) -> None:
    size, ranks = config.take("num_generations"), config.take("num_processes")
    per_update = config.take("per_device_train_batch_size") * config.take("gradient_accumulation_steps") * ranks
    accumulation = config.take("gradient_accumulation_steps")
    generated = config.take("generation_batch_size")
    if generated is None:
        generated = per_update * (config.take("steps_per_generation") or accumulation) // accumulation
    if generated % size:
        raise ConfigError(
            f"num_generations must divide the samples of a batch, as TRL demands, got {size} and {generated}."
        )
    config.put("generators.group_size", size)
    config.put("learner.prompts_per_step", generated // size)
    config.put("learner.num_ranks", ranks)
    if generated > per_update:
        config.put("algorithm.updates_per_step", generated // per_update)
    if config.take("num_iterations") > 1:
        config.note("num_iterations", "a step passes over its batch once; buffer.reuse.max_uses trains again later.")


def _objective(config: Translation) -> None:
    kind, level = config.take("loss_type"), config.take("importance_sampling_level")
    low, high = config.take("epsilon"), config.take("epsilon_high")
    clip = {"clip_low": low, "clip_high": low if high is None else high}
    loss: dict[str, Any] = {"kind": "ppo_clip"} | clip | {"dual_clip": config.take("delta")}
    if kind == "cispo":
        loss = {"kind": "cispo", "clip_high": high or low}
    elif kind == "sapo":
        positive, negative = config.take("sapo_temperature_pos"), config.take("sapo_temperature_neg")
        loss = {"kind": "sapo", "tau_positive": positive, "tau_negative": negative}
    elif kind == "vespo":
        names = {"k_pos": "power_positive", "lambda_pos": "decay_positive"}
        names |= {"k_neg": "power_negative", "lambda_neg": "decay_negative"}
        loss = {"kind": "vespo"} | {ours: config.take(f"vespo_{theirs}") for theirs, ours in names.items()}
    elif level == "sequence":
        loss = {"kind": "gspo"} | clip
    config.put("algorithm/policy_loss", loss.pop("kind"))
    for field, value in loss.items():
        config.put(f"algorithm.policy_loss.{field}", value)
    if kind not in _AGGREGATIONS:
        config.notes.append(f"loss_type={kind}: there is no such loss; ppo_clip with token_mean stands for it.")
    is_sequence = level == "sequence" and kind not in ("cispo", "sapo", "vespo")
    config.put(
        "algorithm.loss_aggregation", "seq_mean_token_mean" if is_sequence else _AGGREGATIONS.get(kind, "token_mean")
    )
    scale = str(config.take("scale_rewards")).lower()
    config.put("algorithm/advantage", {"none": "dr_grpo", "false": "dr_grpo", "batch": "lite_ppo"}.get(scale, "grpo"))
    config.put("algorithm.masks", [])
    config.put("algorithm.entropy_coef", float(config.take("entropy_coef") or 0))
    config.put("algorithm.reward.mask_truncated", True if config.take("mask_truncated_completions") else None)
    if (beta := config.take("beta")) > 0:
        config.put("algorithm.kl.coef", float(beta))
        is_corrected = config.take("use_bias_correction_kl") is not False
        config.put("algorithm.kl.estimator", "k3_off_policy" if is_corrected else "k3")
        if config.take("sync_ref_model"):
            config.same("ref_model_sync_steps", "algorithm.kl.refresh_every_steps")
            config.note("ref_model_mixup_alpha", "the reference becomes the learner's weights, without a mixture.")
    if weights := config.take("reward_weights"):
        config.notes.append(
            f"reward_weights={weights}: list the functions with these weights in generators.reward.functions."
        )
    config.note("top_entropy_quantile", "there is no mask by entropy: all tokens are trained on.")


def _correction(config: Translation) -> None:
    mode, cap = config.take("vllm_importance_sampling_mode"), config.take("vllm_importance_sampling_cap")
    high = cap or config.take("vllm_importance_sampling_clip_max")
    low = config.take("vllm_importance_sampling_clip_min")
    config.put("algorithm/correction", "none")
    if config.take("vllm_importance_sampling_correction") and config.take("use_vllm"):
        level, _, bound = mode.partition("_")
        config.put("algorithm.correction.level", level)
        config.put("algorithm.correction.max_weight", float(high))
        config.put("algorithm.correction.min_weight", low)
        config.put("algorithm.correction.outside", bound)


def _optimizer(config: Translation) -> None:
    config.same("learning_rate", "learner.optimizer.learning_rate", float)
    config.put("learner.optimizer.betas", [config.take("adam_beta1"), config.take("adam_beta2")])
    config.same("adam_epsilon", "learner.optimizer.epsilon", float)
    config.same("weight_decay", "learner.optimizer.weight_decay", float)
    config.same("max_grad_norm", "learner.optimizer.max_grad_norm", float)
    schedule = config.take("lr_scheduler_type")
    ours = "constant" if schedule == "constant_with_warmup" else schedule
    if ours in ("constant", "linear", "cosine"):
        config.put("learner.optimizer.schedule", ours)
    else:
        config.notes.append(f"lr_scheduler_type={schedule}: there are constant, linear and cosine.")
    steps, ratio = config.take("warmup_steps"), config.take("warmup_ratio")
    total = config.take("max_steps")
    if not steps and ratio and total and total > 0:
        steps = int(ratio * total)
    config.put("learner.optimizer.warmup_steps", ceil((steps or 0) / _updates_per_step(config)))


def _updates_per_step(config: Translation) -> int:
    """TRL's updates per generated batch, which is a step here."""
    size = config.take("steps_per_generation") or config.take("gradient_accumulation_steps")
    return max(1, size // config.take("gradient_accumulation_steps"))


def _generation(config: Translation) -> None:
    config.same("temperature", "generators.sampling.temperature", float)
    config.same("top_p", "generators.sampling.top_p", float)
    config.put("generators.sampling.top_k", config.take("top_k") or -1)
    config.same("vllm_gpu_memory_utilization", "generators.engine.gpu_memory_utilization")
    config.same("vllm_tensor_parallel_size", "generators.engine.tensor_parallel_size")
    config.note("max_tool_calling_iterations", "choose generators/agent=tools, and set generators.agent.max_turns.")
    config.put("generators/engine", "vllm_gpu_shared" if config.given.get("vllm_mode") == "colocate" else "vllm_gpu")
    config.put("learner/engine", "deepspeed_zero2")
    config.put("learner.device", "cuda")
    config.notes.append(
        "rewards are functions in the training script: generators.reward.function=FILE.py:NAME accepts TRL's signature "
        "unchanged (docs/rewards.md)."
    )
    lag = config.take("max_staleness")
    config.put("staleness.max_lag", lag or 0)
    config.same("weight_sync_steps", "weights.publish_every_steps")
    if lag is None:
        config.notes.append(
            "staleness.max_lag=0 is the synchronous training of GRPOTrainer: raise it, with a correction, to "
            "let generation and training overlap."
        )


def _schedule(config: Translation) -> None:
    total = config.take("max_steps")
    updates = _updates_per_step(config)
    if total and total > 0:
        config.put("learner.max_steps", max(1, total // updates))
    else:
        config.notes.append("num_train_epochs: set learner.max_steps to rows / prompts_per_step * epochs.")
    config.take("num_train_epochs")
    config.same("seed", "seed")
    config.same("save_steps", "learner.checkpoint.every_steps", lambda steps: max(1, int(steps) // updates))
    config.same("save_total_limit", "learner.checkpoint.keep")
    every = config.take("eval_steps")
    config.put("evaluation.every_steps", int(every) if every and every >= 1 else None)
    config.take("eval_strategy")
    config.same("run_name", "name", lambda name: str(name).replace("/", "_"))
    config.note("output_dir", "runs lie in runs_dir/NAME.")
