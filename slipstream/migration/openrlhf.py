"""Translate dependent settings in command lines of OpenRLHF's `train_ppo_ray`."""

from pathlib import Path

from slipstream.migration.translation import Trainer, Translation, eval_sets

_FILES = (".parquet", ".json", ".jsonl", ".csv", ".gz")


def _data(config: Translation) -> None:
    for theirs, ours in (("data.prompt_dataset", "data.train"), ("eval.dataset", "data.eval")):
        if not (value := config.take(theirs)):
            continue
        paths = [path.removeprefix("json@") for path in str(value).split(",")]
        if missing := [path for path in paths if Path(path).suffix not in _FILES]:
            config.notes.append(f"{ours}: write the rows of {', '.join(missing)} into a file (docs/data.md).")
        elif ours == "data.train":
            config.put(ours, paths[0] if len(paths) == 1 else paths)
        else:
            samples, temperature = config.take_all("eval", "n_samples_per_prompt", "temperature")
            config.put(ours, eval_sets(paths, samples=samples, temperature=temperature))
    config.put_columns(prompt="data.input_key", ground_truth="data.label_key", images="data.image_key")
    answer, whole = config.take("rollout.max_new_tokens"), config.take("data.max_len")
    prompt = config.take("prompt_max_len") or (whole - answer if whole and whole > answer else 1024)
    config.put("data.max_prompt_tokens", prompt)
    config.put("model.max_length", prompt + answer)
    size, limit, is_dynamic = config.take_all("train", "micro_batch_size", "max_tokens_per_gpu", "dynamic_batch_enable")
    tokens = limit if is_dynamic else size * (prompt + answer)
    config.put("learner.tokens_per_microbatch", max(tokens, prompt + answer))
    if config.take("ds.lora.rank"):
        config.same_all("lora")


def _objective(config: Translation) -> None:
    samples = config.take("rollout.batch_size") * config.take("rollout.n_samples_per_prompt")
    config.put("algorithm.updates_per_step", max(1, samples // config.take("train.batch_size")))
    names = {"gae": "gae", "reinforce": "reinforce_plus_plus", "reinforce_baseline": "reinforce_plus_plus_baseline"}
    names |= {"rloo": "rloo", "group_norm": "grpo", "dr_grpo": "dr_grpo"}
    ours = names.get(name := config.take("algo.advantage.estimator"))
    if ours is None:
        config.notes.append(f"advantage estimator {name}: there is none; algorithm/advantage=grpo stays.")
    config.put("algorithm/advantage", ours)
    if ours in ("gae", "reinforce_plus_plus") or config.given.get("algo.advantage.gamma") == 1:
        config.same("algo.advantage.gamma", "algorithm.advantage.gamma", lambda gamma: None if gamma == 1 else gamma)
    if ours == "gae":
        config.same_all("gae")
    is_sequence = config.take("actor.policy_loss_type") == "gspo"
    config.put("algorithm/policy_loss", "gspo" if is_sequence else "ppo_clip")
    both = [config.take("actor.eps_clip")] * 2
    low, high = config.take("actor.eps_clip_low_high") or both
    dual_clip = None if is_sequence else config.take("actor.dual_clip")
    config.put_all("algorithm.policy_loss", clip_low=low, clip_high=high, dual_clip=dual_clip)
    mode = str(config.take("actor.loss_agg_mode")).replace("-", "_")
    config.put("algorithm.loss_aggregation", "seq_mean_token_mean" if is_sequence else mode)


def _kl(config: Translation) -> None:
    names = ("init_coef", "estimator", "target", "horizon", "use_loss")
    coefficient, kind, target, horizon, is_loss = config.take_all("algo.kl", *names)
    if coefficient:
        place, adaptive = "loss" if is_loss else "reward", {"target": target, "horizon": horizon} if target else None
        config.put_all("algorithm.kl", coef=coefficient, estimator=kind, apply_to=place, adaptive=adaptive)


def _correction(config: Translation) -> None:
    key = "algo.advantage.is_correction"
    threshold = config.take(f"{key}_threshold")
    level = config.take(f"{key}_level") or ("token" if config.take("enable_vllm_is_correction") else "off")
    mode, gating = config.take(f"{key}_mode"), config.take(f"{key}_gating")
    config.put("algorithm/correction", "none")
    if level == "token" and gating in (None, "ratio") and not mode.startswith("seq"):
        low, high = threshold if isinstance(threshold, list) else (None, threshold)
        outside = "mask" if mode in ("mask", "icepop") else "truncate"
        config.put_all("algorithm.correction", level="token", min_weight=low, max_weight=high, outside=outside)
    elif level != "off":
        config.notes.append(
            f"{key}_level={level} with mode={mode} and gating={gating}: choose algorithm/correction=geo_rs or k3_rs."
        )
    if config.take("algo.dynamic_filtering_enable"):
        low, high = config.take("algo.dynamic_filtering_range")
        config.put("buffer/filter", "accuracy")
        config.put_all("buffer.filter", min_accuracy=low, max_accuracy=high)


def _run(config: Translation) -> None:
    gpus = config.take("actor.num_nodes") * config.take("actor.num_gpus_per_node")
    is_async, is_shared, queue = config.take_all("train", "async_enable", "colocate_all", "async_queue_size")
    engines = config.take("vllm.num_engines") or 1
    if is_shared and not is_async:
        config.put_shared_gpus("OpenRLHF", gpus, engine_gpus=config.take("vllm.tensor_parallel_size"))
    else:
        config.put("learner.num_ranks", gpus)
        config.put("generators.count", engines)
    config.put("staleness.max_lag", queue + 1 if is_async else 0)
    config.put_schedule("actor.lr_scheduler", warmup_ratio="actor.lr_warmup_ratio")
    key, board = config.take_all("logger", "wandb.key", "tensorboard_dir")
    options = {"project": "logger.wandb.project", "group": "logger.wandb.group"}
    config.put_loggers(["wandb" if key else None, "tensorboard" if board else None], options=options)
    remote, model = str(config.take("reward.remote_url") or ""), config.take("reward.model_name_or_path")
    if remote.endswith(".py"):
        config.put("generators.reward.function", f"{remote}:reward_func")
        config.note(
            "reward.remote_url", "give reward_func a form of docs/rewards.md, such as (solution_str, ground_truth)."
        )
    elif remote:
        config.notes.append(f"remote reward {remote}: write a function that queries it (docs/rewards.md).")
    elif model:
        config.put_reward_model(model)


OPENRLHF = Trainer("openrlhf.yaml", special=(_data, _objective, _kl, _correction, _run))
