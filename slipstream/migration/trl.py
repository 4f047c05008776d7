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
    all_of = Translation(given, _DEFAULTS)
    for translate in (_model, _batch, _objective, _correction, _optimizer, _generation, _staleness, _schedule):
        translate(all_of)
    return all_of.result(decided_here=_DECIDED_HERE)


def _model(all_of: Translation) -> None:
    all_of.same("model_name_or_path", "model.path")
    all_of.same("trust_remote_code", "model.trust_remote_code")
    dtype = all_of.take("dtype") or ("bfloat16" if all_of.take("bf16") else "float32")
    all_of.put("model.dtype", dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16")
    all_of.same("gradient_checkpointing", "learner.engine.gradient_checkpointing")
    if all_of.take("use_peft"):
        all_of.put("model.lora.rank", all_of.take("lora_r") or 16)
        all_of.put("model.lora.alpha", float(all_of.take("lora_alpha") or 32))
        all_of.same("lora_target_modules", "model.lora.targets")
        all_of.same("use_rslora", "model.lora.rslora")
    response = all_of.take("max_completion_length")
    prompt = all_of.take("max_prompt_length") or all_of.take("vllm_max_model_length") or 2 * response
    prompt = prompt if all_of.given.get("max_prompt_length") or prompt <= response else prompt - response
    all_of.put("data.max_prompt_tokens", prompt)
    all_of.put("generators.sampling.max_tokens", response)
    all_of.leave_default_task(max_length=prompt + response, tokens_per_microbatch=16384)
    all_of.note("dataset_name", "name its rows as files: data.train=FILE, data.heldout=FILE (docs/data.md).")


def _batch(all_of: Translation) -> None:
    size, ranks = all_of.take("num_generations"), all_of.take("num_processes")
    per_update = all_of.take("per_device_train_batch_size") * all_of.take("gradient_accumulation_steps") * ranks
    accumulation = all_of.take("gradient_accumulation_steps")
    generated = all_of.take("generation_batch_size")
    if generated is None:
        generated = per_update * (all_of.take("steps_per_generation") or accumulation) // accumulation
    if generated % size:
        raise ConfigError(
            f"num_generations must divide the samples of a batch, as TRL demands, got {size} and {generated}."
        )
    all_of.put("generators.group_size", size)
    all_of.put("learner.groups_per_step", generated // size)
    all_of.put("learner.num_ranks", ranks)
    if generated > per_update:
        all_of.put("algorithm.updates_per_step", generated // per_update)
    if all_of.take("num_iterations") > 1:
        all_of.note("num_iterations", "a step passes over its batch once; buffer.reuse.max_uses trains again later.")


def _objective(all_of: Translation) -> None:
    kind, level = all_of.take("loss_type"), all_of.take("importance_sampling_level")
    low, high = all_of.take("epsilon"), all_of.take("epsilon_high")
    clip = {"clip_low": low, "clip_high": low if high is None else high}
    loss: dict[str, Any] = {"kind": "ppo_clip"} | clip | {"dual_clip": all_of.take("delta")}
    if kind == "cispo":
        loss = {"kind": "cispo", "clip_high": high or low}
    elif kind == "sapo":
        positive, negative = all_of.take("sapo_temperature_pos"), all_of.take("sapo_temperature_neg")
        loss = {"kind": "sapo", "tau_positive": positive, "tau_negative": negative}
    elif kind == "vespo":
        names = {"k_pos": "power_positive", "lambda_pos": "decay_positive"}
        names |= {"k_neg": "power_negative", "lambda_neg": "decay_negative"}
        loss = {"kind": "vespo"} | {ours: all_of.take(f"vespo_{theirs}") for theirs, ours in names.items()}
    elif level == "sequence":
        loss = {"kind": "gspo"} | clip
    all_of.put("algorithm/policy_loss", loss.pop("kind"))
    for field, value in loss.items():
        all_of.put(f"algorithm.policy_loss.{field}", value)
    if kind not in _AGGREGATIONS:
        all_of.notes.append(f"loss_type={kind}: there is no such loss; ppo_clip with token_mean stands for it.")
    is_sequence = level == "sequence" and kind not in ("cispo", "sapo", "vespo")
    all_of.put("algorithm.aggregation", "seq_mean_token_mean" if is_sequence else _AGGREGATIONS.get(kind, "token_mean"))
    scale = str(all_of.take("scale_rewards")).lower()
    all_of.put("algorithm/advantage", {"none": "dr_grpo", "false": "dr_grpo", "batch": "lite_ppo"}.get(scale, "grpo"))
    all_of.put("algorithm.masks", [])
    all_of.put("algorithm.entropy_coefficient", float(all_of.take("entropy_coef") or 0))
    all_of.put("algorithm.reward.truncated", "mask" if all_of.take("mask_truncated_completions") else None)
    if (beta := all_of.take("beta")) > 0:
        all_of.put("algorithm.kl.coefficient", float(beta))
        is_corrected = all_of.take("use_bias_correction_kl") is not False
        all_of.put("algorithm.kl.estimator", "k3_off_policy" if is_corrected else "k3")
        if all_of.take("sync_ref_model"):
            all_of.same("ref_model_sync_steps", "algorithm.kl.refresh_every_steps")
            all_of.note("ref_model_mixup_alpha", "the reference becomes the learner's weights, without a mixture.")
    if weights := all_of.take("reward_weights"):
        all_of.notes.append(
            f"reward_weights={weights}: list the functions with these weights in generators.reward.functions."
        )
    all_of.note("top_entropy_quantile", "there is no mask by entropy: all tokens are trained on.")


def _correction(all_of: Translation) -> None:
    mode, cap = all_of.take("vllm_importance_sampling_mode"), all_of.take("vllm_importance_sampling_cap")
    high = cap or all_of.take("vllm_importance_sampling_clip_max")
    low = all_of.take("vllm_importance_sampling_clip_min")
    all_of.put("algorithm/correction", "none")
    if all_of.take("vllm_importance_sampling_correction") and all_of.take("use_vllm"):
        level, _, bound = mode.partition("_")
        all_of.put("algorithm.correction.level", level)
        all_of.put("algorithm.correction.high", float(high))
        all_of.put("algorithm.correction.low", low)
        all_of.put("algorithm.correction.bound", bound)


def _optimizer(all_of: Translation) -> None:
    all_of.same("learning_rate", "learner.optimizer.learning_rate", float)
    all_of.put("learner.optimizer.betas", [all_of.take("adam_beta1"), all_of.take("adam_beta2")])
    all_of.same("adam_epsilon", "learner.optimizer.epsilon", float)
    all_of.same("weight_decay", "learner.optimizer.weight_decay", float)
    all_of.same("max_grad_norm", "learner.optimizer.max_grad_norm", float)
    schedule = all_of.take("lr_scheduler_type")
    ours = "constant" if schedule == "constant_with_warmup" else schedule
    if ours in ("constant", "linear", "cosine"):
        all_of.put("learner.optimizer.schedule", ours)
    else:
        all_of.notes.append(f"lr_scheduler_type={schedule}: there are constant, linear and cosine.")
    steps, ratio = all_of.take("warmup_steps"), all_of.take("warmup_ratio")
    total = all_of.take("max_steps")
    if not steps and ratio and total and total > 0:
        steps = int(ratio * total)
    all_of.put("learner.optimizer.warmup_steps", ceil((steps or 0) / _updates_per_step(all_of)))


def _updates_per_step(all_of: Translation) -> int:
    """Return TRL's optimizer updates per generated batch, which is Slipstream's step."""
    size = all_of.take("steps_per_generation") or all_of.take("gradient_accumulation_steps")
    return max(1, size // all_of.take("gradient_accumulation_steps"))


def _generation(all_of: Translation) -> None:
    all_of.same("temperature", "generators.sampling.temperature", float)
    all_of.same("top_p", "generators.sampling.top_p", float)
    all_of.put("generators.sampling.top_k", all_of.take("top_k") or -1)
    all_of.same("vllm_gpu_memory_utilization", "generators.engine.gpu_memory_utilization")
    all_of.same("vllm_tensor_parallel_size", "generators.engine.tensor_parallel_size")
    all_of.note("max_tool_calling_iterations", "choose generators/agent=tools, and set generators.agent.max_turns.")
    all_of.put("generators/engine", "vllm_gpu_shared" if all_of.given.get("vllm_mode") == "colocate" else "vllm_gpu")
    all_of.put("learner/engine", "deepspeed_zero2")
    all_of.put("learner.device", "cuda")
    all_of.notes.append(
        "rewards are functions in the training script: generators.reward.function=FILE.py:NAME accepts TRL's signature "
        "unchanged (docs/rewards.md)."
    )


def _staleness(all_of: Translation) -> None:
    lag = all_of.take("max_staleness")
    all_of.put("buffer.staleness.max_lag", lag or 0)
    all_of.same("weight_sync_steps", "weights.publish_every_steps")
    if lag is None:
        all_of.notes.append(
            "buffer.staleness.max_lag=0 is the synchronous training of GRPOTrainer: raise it, with a correction, to "
            "let generation and training overlap."
        )


def _schedule(all_of: Translation) -> None:
    total = all_of.take("max_steps")
    updates = _updates_per_step(all_of)
    if total and total > 0:
        all_of.put("learner.max_steps", max(1, total // updates))
    else:
        all_of.notes.append("num_train_epochs: set learner.max_steps to rows / groups_per_step * epochs.")
    all_of.take("num_train_epochs")
    all_of.same("seed", "seed")
    all_of.same("save_steps", "learner.checkpoint.every_steps", lambda steps: max(1, int(steps) // updates))
    all_of.same("save_total_limit", "learner.checkpoint.keep")
    every = all_of.take("eval_steps")
    all_of.put("evaluation.every_steps", int(every) if every and every >= 1 else None)
    all_of.take("eval_strategy")
    all_of.same("run_name", "name", lambda name: str(name).replace("/", "_"))
    all_of.note("output_dir", "runs lie in runs_dir/NAME.")
