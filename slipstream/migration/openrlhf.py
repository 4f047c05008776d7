"""Translate command lines of OpenRLHF's `train_ppo_ray`: settings that depend on each other."""

from pathlib import Path

from slipstream.migration.translation import Trainer, Translation, eval_sets

_PROMPTS, _SAMPLES = "rollout.batch_size", "rollout.n_samples_per_prompt"
_BATCH, _ANSWER = "train.batch_size", "rollout.max_new_tokens"
_ESTIMATOR = "algo.advantage.estimator"
_LR, _WARMUP = "actor.lr_scheduler", "actor.lr_warmup_ratio"
_WIDTH, _ASYNC = "vllm.tensor_parallel_size", "train.async_enable"
_FILES = (".parquet", ".json", ".jsonl", ".csv", ".gz")


def _data(config: Translation) -> None:
    for theirs, ours in (("data.prompt_dataset", "data.train"), ("eval.dataset", "data.eval")):
        if not (value := config.take(theirs)):
            continue
        paths = [path.partition("@")[2] if path.startswith("json@") else path for path in str(value).split(",")]
        if missing := [path for path in paths if Path(path).suffix not in _FILES]:
            config.notes.append(f"{ours}: write the rows of {', '.join(missing)} into a file (docs/data.md).")
        elif ours == "data.train":
            config.put(ours, paths[0] if len(paths) == 1 else paths)
        else:
            samples = config.take("eval.n_samples_per_prompt")
            temperature = config.take("eval.temperature")
            config.put(ours, eval_sets(paths, samples=samples, temperature=temperature))
    config.put_columns(prompt="data.input_key", ground_truth="data.label_key", images="data.image_key")
    answer, whole = config.take(_ANSWER), config.take("data.max_len")
    prompt = config.take("prompt_max_len") or (whole - answer if whole and whole > answer else 1024)
    config.put("data.max_prompt_tokens", prompt)
    config.put("model.max_length", prompt + answer)
    micro = config.take("train.micro_batch_size") * (prompt + answer)
    limit = config.take("train.max_tokens_per_gpu")
    is_dynamic = config.take("train.dynamic_batch_enable")
    config.put("learner.tokens_per_microbatch", max(limit if is_dynamic else micro, prompt + answer))
    if rank := config.take("ds.lora.rank"):
        config.put("model.lora.rank", rank)
        config.same("ds.lora.alpha", "model.lora.alpha")
        config.same("ds.lora.target_modules", "model.lora.targets")


def _objective(config: Translation) -> None:
    samples = config.take(_PROMPTS) * config.take(_SAMPLES)
    config.put("algorithm.updates_per_step", max(1, samples // config.take(_BATCH)))
    names = {"gae": "gae", "reinforce": "reinforce_plus_plus", "reinforce_baseline": "reinforce_plus_plus_baseline"}
    names |= {"rloo": "rloo", "group_norm": "grpo", "dr_grpo": "dr_grpo"}
    ours = names.get(name := config.take(_ESTIMATOR))
    if ours is None:
        config.notes.append(f"advantage estimator {name}: there is none; algorithm/advantage=grpo stays.")
    config.put("algorithm/advantage", ours)
    if ours in ("gae", "reinforce_plus_plus") or config.given.get("algo.advantage.gamma") == 1:
        config.same("algo.advantage.gamma", "algorithm.advantage.gamma", lambda gamma: None if gamma == 1 else gamma)
    if ours == "gae":
        config.same("algo.advantage.lambd", "algorithm.advantage.lam")
        config.same("critic.model_name_or_path", "algorithm.critic.path")
        config.same("critic.adam.lr", "algorithm.critic.optimizer.learning_rate")
        config.same("critic.value_clip", "algorithm.critic.value_clip")
        config.same("critic.freezing_steps", "algorithm.critic.warmup_steps", lambda steps: max(steps, 0))
    is_sequence = config.take("actor.policy_loss_type") == "gspo"
    config.put("algorithm/policy_loss", "gspo" if is_sequence else "ppo_clip")
    both = [config.take("actor.eps_clip")] * 2
    low, high = config.take("actor.eps_clip_low_high") or both
    config.put("algorithm.policy_loss.clip_low", low)
    config.put("algorithm.policy_loss.clip_high", high)
    config.put("algorithm.policy_loss.dual_clip", config.take("actor.dual_clip") if not is_sequence else None)
    mode = str(config.take("actor.loss_agg_mode")).replace("-", "_")
    config.put("algorithm.loss_aggregation", "seq_mean_token_mean" if is_sequence else mode)
    config.put("algorithm.masks", [])
    _kl(config)


def _kl(config: Translation) -> None:
    coefficient, kind = config.take("algo.kl.init_coef"), config.take("algo.kl.estimator")
    target, horizon = config.take("algo.kl.target"), config.take("algo.kl.horizon")
    is_loss = config.take("algo.kl.use_loss")
    if coefficient:
        config.put("algorithm.kl.coef", coefficient)
        config.put("algorithm.kl.estimator", kind)
        config.put("algorithm.kl.apply_to", "loss" if is_loss else "reward")
        config.put("algorithm.kl.adaptive", {"target": target, "horizon": horizon} if target else None)


def _correction(config: Translation) -> None:
    key = "algo.advantage.is_correction"
    threshold = config.take(f"{key}_threshold")
    level = config.take(f"{key}_level") or ("token" if config.take("enable_vllm_is_correction") else "off")
    mode, gating = config.take(f"{key}_mode"), config.take(f"{key}_gating")
    config.put("algorithm/correction", "none")
    if level == "token" and gating in (None, "ratio") and not mode.startswith("seq"):
        low, high = threshold if isinstance(threshold, list) else (None, threshold)
        config.put("algorithm.correction.level", "token")
        config.put("algorithm.correction.min_weight", low)
        config.put("algorithm.correction.max_weight", high)
        config.put("algorithm.correction.outside", "mask" if mode in ("mask", "icepop") else "truncate")
    elif level != "off":
        config.notes.append(
            f"{key}_level={level} with mode={mode} and gating={gating}: choose algorithm/correction=geo_rs or k3_rs."
        )
    if config.take("algo.dynamic_filtering_enable"):
        low, high = config.take("algo.dynamic_filtering_range")
        config.put("buffer/filter", "accuracy")
        config.put("buffer.filter.min_accuracy", low)
        config.put("buffer.filter.max_accuracy", high)


def _run(config: Translation) -> None:
    gpus, is_async = config.take("actor.num_nodes") * config.take("actor.num_gpus_per_node"), config.take(_ASYNC)
    engines = config.take("vllm.num_engines") or 1
    if config.take("train.colocate_all") and not is_async:
        config.put_shared_gpus("OpenRLHF", gpus, engine_gpus=config.take(_WIDTH))
    else:
        config.put("learner.num_ranks", gpus)
        config.put("generators.count", engines)
    config.put("learner.device", "cuda")
    queue = config.take("train.async_queue_size")
    config.put("staleness.max_lag", queue + 1 if is_async else 0)
    config.put_schedule(_LR, warmup_steps=None, warmup_ratio=_WARMUP, total=None)
    key, board = config.take("logger.wandb.key"), config.take("logger.tensorboard_dir")
    options = {"project": "logger.wandb.project", "group": "logger.wandb.group"}
    config.put_loggers(["wandb" if key else None, "tensorboard" if board else None], options=options)
    remote = str(config.take("reward.remote_url") or "")
    model = config.take("reward.model_name_or_path")
    if remote.endswith(".py"):
        config.put("generators.reward.function", f"{remote}:reward_func")
        config.note(
            "reward.remote_url", "give reward_func a form of docs/rewards.md, such as (solution_str, ground_truth)."
        )
    elif remote:
        config.notes.append(f"remote reward {remote}: write a function that queries it (docs/rewards.md).")
    elif model:
        config.put_reward_model(model)


OPENRLHF = Trainer("openrlhf.yaml", special=(_data, _objective, _correction, _run))
