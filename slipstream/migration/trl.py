"""Translate dependent settings of TRL 1.16's GRPO trainers."""

from math import ceil, sqrt

from slipstream.configs.base import ConfigError
from slipstream.migration.translation import Trainer, Translation


def _model(config: Translation) -> None:
    dtype = config.take("dtype") or ("bfloat16" if config.take("bf16") else "float32")
    config.put("model.dtype", dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16")
    config.put("model.chat_template_kwargs", config.record("chat_template_kwargs") or None)
    if config.take("use_peft"):
        rank, alpha = config.take("lora_r") or 16, config.take("lora_alpha") or 32
        # rsLoRA scales by alpha / sqrt(rank) instead of alpha / rank.
        config.put_all("model.lora", rank=rank, alpha=alpha * sqrt(rank) if config.take("use_rslora") else alpha)
        config.same("lora_target_modules", "model.lora.targets")
    response = config.take("max_completion_length")
    prompt = config.take("max_prompt_length") or config.take("vllm_max_model_length") or 2 * response
    prompt = prompt if config.given.get("max_prompt_length") or prompt <= response else prompt - response
    config.put("data.max_prompt_tokens", prompt)
    config.put("generators.sampling.max_tokens", response)
    config.put("model.max_length", prompt + response)
    config.put("learner.tokens_per_microbatch", max(prompt + response, 16384))


def _batch(config: Translation) -> None:
    size, ranks = config.take("num_generations"), config.take("num_processes")
    accumulation = config.take("gradient_accumulation_steps")
    per_update = config.take("per_device_train_batch_size") * accumulation * ranks
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


def _objective(config: Translation) -> None:
    kind, level = config.take("loss_type"), config.take("importance_sampling_level")
    low, high = config.take("epsilon"), config.take("epsilon_high")
    clip = {"clip_low": low, "clip_high": low if high is None else high}
    loss = kind if kind in ("cispo", "sapo", "vespo") else "gspo" if level == "sequence" else "ppo_clip"
    config.put("algorithm/policy_loss", loss)
    fields = {"cispo": {"clip_high": high or low}, "gspo": clip, "ppo_clip": clip | {"dual_clip": config.take("delta")}}
    config.put_all("algorithm.policy_loss", **fields.get(loss, {}))
    config.same_all(loss)
    aggregations = config.tables["aggregations"]
    if kind not in aggregations:
        config.notes.append(f"loss_type={kind}: there is no such loss; ppo_clip with token_mean stands for it.")
    mean = "seq_mean_token_mean" if loss == "gspo" else aggregations.get(kind, "token_mean")
    config.put("algorithm.loss_aggregation", mean)
    scale = str(config.take("scale_rewards")).lower()
    config.put("algorithm/advantage", {"none": "dr_grpo", "false": "dr_grpo", "batch": "lite_ppo"}.get(scale, "grpo"))
    config.put("algorithm.reward.mask_truncated", True if config.take("mask_truncated_completions") else None)
    if (beta := config.take("beta")) > 0:
        is_corrected = config.take("use_bias_correction_kl") is not False
        config.put_all("algorithm.kl", coef=beta, estimator="k3_off_policy" if is_corrected else "k3")
        if config.take("sync_ref_model"):
            config.same("ref_model_sync_steps", "algorithm.kl.refresh_every_steps")
            config.note("ref_model_mixup_alpha", "the reference becomes the learner's weights, without a mixture.")


def _correction(config: Translation) -> None:
    mode, cap = config.take("vllm_importance_sampling_mode"), config.take("vllm_importance_sampling_cap")
    high = cap or config.take("vllm_importance_sampling_clip_max")
    low = config.take("vllm_importance_sampling_clip_min")
    config.put("algorithm/correction", "none")
    if config.take("vllm_importance_sampling_correction") and config.take("use_vllm"):
        level, _, bound = mode.partition("_")
        config.put_all("algorithm.correction", level=level, max_weight=high, min_weight=low, outside=bound)


def _run(config: Translation) -> None:
    updates = (config.take("steps_per_generation") or 0) // config.take("gradient_accumulation_steps") or 1
    total = config.take("max_steps")
    steps, epochs = total // updates if total and total > 0 else None, ceil(config.take("num_train_epochs"))
    config.put("learner.epochs" if steps is None else "learner.max_steps", epochs if steps is None else max(1, steps))
    config.put("learner.optimizer.betas", [config.take("adam_beta1"), config.take("adam_beta2")])
    warmup = ceil((config.take("warmup_steps") or 0) / updates)
    config.put_schedule("lr_scheduler_type", warmup_steps=warmup, warmup_ratio="warmup_ratio", total=steps)
    config.same("save_steps", "learner.checkpoint.every_steps", lambda steps: max(1, int(steps) // updates))
    config.take("eval_strategy")
    config.take("save_strategy")
    config.put_loggers(config.take("report_to"), options={"project": "project"})
    config.put("learner.engine.zero_stage", 2)
    config.notes.append(
        "rewards are functions in the training script: generators.reward.function=FILE.py:NAME accepts TRL's signature "
        "unchanged (docs/rewards.md)."
    )
    config.same("max_staleness", "staleness.max_lag")
    if config.take("max_staleness") is None:
        config.put_synchronous()


TRL = Trainer("trl.yaml", special=(_model, _batch, _objective, _correction, _run))
