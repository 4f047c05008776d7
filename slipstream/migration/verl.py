"""Translate dependent settings of verl 0.9."""

import math
from pathlib import Path
from typing import Any

import yaml

from slipstream.migration.translation import Trainer, Translation, eval_sets

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_FIELD = "algorithm.policy_loss."
_TURNS, _LOSS, _TEACHER = f"{_ROLLOUT}.multi_turn", "distillation.distillation_loss", "distillation.teacher_models"


def _data(config: Translation) -> None:
    samples, *sampling = config.take_all(f"{_ROLLOUT}.val_kwargs", "n", "temperature", "top_p", "top_k")
    if files := config.take("data.val_files"):
        settings = dict(zip(("temperature", "top_p", "top_k"), sampling, strict=True))
        config.put("data.eval", eval_sets(files, samples=samples, **settings))
    length = config.take("data.max_prompt_length") + config.take("data.max_response_length")
    config.put("model.max_length", length)
    config.put("learner.tokens_per_microbatch", max(length, config.take(f"{_ACTOR}.ppo_max_token_len_per_gpu")))
    config.put("data.on_too_long", "skip" if config.take("data.filter_overlong_prompts") else "error")
    config.put_columns(prompt="data.prompt_key", images="data.image_key")
    config.put("model.chat_template_kwargs", config.record("data.apply_chat_template_kwargs") or None)
    if config.take(f"{_MODEL}.lora_rank"):
        config.same_all("lora")


def _batch(config: Translation) -> None:
    groups, mini = config.take("data.train_batch_size"), config.take(f"{_ACTOR}.ppo_mini_batch_size")
    config.put("learner.prompts_per_step", groups or mini)
    if groups and groups > mini:
        config.put("algorithm.updates_per_step", groups // mini)
        if groups % mini:
            config.notes.append(
                f"data.train_batch_size={groups} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}: a step is "
                "split into updates of one size."
            )
    if config.take("algorithm.filter_groups.enable"):
        config.put("buffer/filter", "zero_advantage")


def _advantage(config: Translation) -> None:
    name = config.take("algorithm.adv_estimator")
    ours = config.tables["advantages"].get(name)
    config.put("algorithm.advantage.per_turn", name == "tir_optimal_token_baseline" or None)
    if ours is None:
        config.notes.append(
            f"algorithm.adv_estimator={name}: there is no such advantage; algorithm/advantage=grpo stays."
        )
        return
    is_scaled = config.take("algorithm.norm_adv_by_std_in_grpo")
    ours = "dr_grpo" if ours == "grpo" and not is_scaled else ours
    config.put("algorithm/advantage", ours)
    gamma, lam = config.take("algorithm.gamma"), config.take("algorithm.lam")
    if ours in ("gae", "reinforce_plus_plus"):
        config.put("algorithm.advantage.gamma", gamma)
    if ours == "gae":
        config.put("algorithm.advantage.lam", lam)
        config.same_all("critic")
    else:
        config.decided["only algorithm/advantage=gae has a critic"] = ["critic.", "trainer.critic_warmup"]
    if ours == "gdpo":
        names, weights = config.take("algorithm.gdpo_reward_keys"), config.take("algorithm.gdpo_reward_weights")
        shares = dict(zip(names, weights or [1] * len(names), strict=False)) if names else None
        config.put("algorithm.advantage.weights", shares)


def _loss(config: Translation) -> None:
    name = config.take(f"{_ACTOR}.policy_loss.loss_mode")
    losses = config.tables["losses"]
    if name not in losses:
        config.notes.append(f"{_ACTOR}.policy_loss.loss_mode={name}: there is no such loss; ppo_clip stays.")
    ours, fields = losses.get(name) or losses["vanilla"]
    config.put("algorithm/policy_loss", ours)
    if ours == "dppo":
        config.put("algorithm.policy_loss.divergence", name.removeprefix("dppo_"))
    for theirs, field in fields.items():
        config.same(f"{_ACTOR}.{theirs}", field)
    if config.take(f"{_ACTOR}.clip_ratio_low") >= 1 and ours == "cispo":
        # No ratio is below 0: without a bound.
        del config.ours["algorithm.policy_loss.clip_low"]
    if config.take(f"{_ACTOR}.clip_ratio") not in (None, config.take(f"{_ACTOR}.clip_ratio_high")):
        config.note(f"{_ACTOR}.clip_ratio", "verl 0.9 uses clip_ratio_low and clip_ratio_high instead, 0.2 by default.")
    # verl forces the sequence mean for these two losses.
    mode = config.take(f"{_ACTOR}.loss_agg_mode")
    mean = "seq_mean_token_mean" if ours in ("gspo", "sapo") else mode.replace("-", "_")
    config.put("algorithm.loss_aggregation", mean)


def _kl(config: Translation) -> None:
    coefficient, kind, is_loss = config.take_all(_ACTOR, "kl_loss_coef", "kl_loss_type", "use_kl_loss")
    if is_loss:
        table = config.tables["straight_through" if kind.endswith("+") else "estimators"]
        config.put_all("algorithm.kl", coef=coefficient, estimator=table.get(kind.removesuffix("+"), kind))
    price, target, horizon, control = config.take_all("algorithm.kl_ctrl", "kl_coef", "target_kl", "horizon", "type")
    penalty, is_reward = config.take_all("algorithm", "kl_penalty", "use_kl_in_reward")
    if is_reward and price:
        kind, adaptive = config.tables["estimators"].get(penalty, penalty), {"target": target, "horizon": horizon}
        config.put_all("algorithm.kl", coef=price, estimator=kind, apply_to="reward")
        config.put("algorithm.kl.adaptive", adaptive if control == "adaptive" else None)


def _correction(config: Translation) -> None:
    key = "algorithm.rollout_correction"
    level, threshold = config.take_all(key, "rollout_is", "rollout_is_threshold")
    rejections, bounds = config.take_all(key, "rollout_rs", "rollout_rs_threshold")
    normalizes, is_bypass = config.take_all(key, "rollout_is_batch_normalize", "bypass_mode")
    if is_bypass and config.take(f"{key}.loss_type") == "reinforce":
        # Its weights are those of the generator, as without bypass.
        is_bypass = False
        config.ours = {ours: value for ours, value in config.ours.items() if not ours.startswith(_FIELD)}
        config.put("algorithm/policy_loss", "reinforce")
        config.note(f"{key}.loss_type", "weights are those at the start of the step.")
    config.put("algorithm/correction", "none")
    config.put("algorithm.proximal", "generator" if is_bypass else None)
    if level and not is_bypass:
        low, _, high = str(threshold).rpartition("_")
        outside = {"min_weight": float(low), "outside": "mask"} if low else {}
        config.put_all("algorithm.correction", level=level, max_weight=float(high), **outside, normalize=normalizes)
    if rejections:
        names, limits = str(rejections).split(","), str(bounds).split(",")
        limits = limits * len(names) if len(limits) == 1 else limits
        rejects = []
        # Such as `seq_mean_k3` with `0.01`, or `token_k1` with `0.5_2.0`.
        for name, bound in zip(names, limits, strict=False):
            level, *rest = name.strip().split("_")
            low, _, high = bound.strip().rpartition("_")
            kept = ({"low": float(low)} if low else {}) | {"high": float(high)}
            rejects.append({"statistic": rest[-1], "over": "token" if level == "token" else rest[0]} | kept)
        config.put("algorithm.correction.reject", rejects)


def _distillation(config: Translation) -> None:
    if not config.take("distillation.enabled"):
        return
    start, end = f"{_TEACHER}.", ".model_path"
    teachers = {key: config.take(key) for key in config.given if key.startswith(start) and key.endswith(end)}
    config.put("algorithm.distillation.teacher_path", next(iter(teachers.values()), None))
    if len(teachers) > 1:
        config.notes.append(f"{_TEACHER}: there is one teacher; all rows would be taught by the first one.")
    mode, is_gradient = config.take(f"{_LOSS}.loss_mode"), bool(config.take(f"{_LOSS}.use_policy_gradient"))
    kind = config.tables["estimators"].get(mode, mode)
    config.put("algorithm.distillation.divergence", kind if kind in ("k1", "k3", "forward_kl_topk") else "k3")
    if (kind, is_gradient) not in (("k1", True), ("k3", False), ("forward_kl_topk", False)):
        config.notes.append(
            f"{_LOSS}.loss_mode={mode} with use_policy_gradient={is_gradient}: k1 is an advantage, k3 and "
            "forward_kl_topk are losses; choose algorithm.distillation.divergence."
        )
    if config.given.get(f"{_ROLLOUT}.n", 1) == 1 and not config.take(f"{_LOSS}.use_task_rewards"):
        # The advantage has no weight, and others need groups.
        config.put("algorithm/advantage", "moving_baseline")
    config.same_all("distillation")


def _agent(config: Translation) -> None:
    tools = _classes(config, f"{_TURNS}.tool_config_path", "tools")
    users = _classes(config, f"{_TURNS}.interaction_config_path", "interaction")
    key = f"{_ROLLOUT}.agent.default_agent_loop"
    if (loop := config.take(key)) not in ("single_turn_agent", "tool_agent", "react_agent"):
        config.note(key, "write it as generators/agent=custom with generators.agent.function.")
        return
    if users is None and tools is None and loop == "single_turn_agent":
        if config.take(f"{_TURNS}.enable"):
            config.note(f"{_TURNS}.enable", "choose generators/agent=tools or interaction for rows without agent_name.")
        return
    config.put("generators/agent", "tools" if users is None else "interaction")
    config.put_all("generators.agent", tools=tools or [], interactions=users)
    config.same_all("turns")
    if not (tools or users):
        config.notes.append("generators.agent.tools: name the tools of your rows (docs/agents.md).")
    if tools:
        config.notes.append(
            "verl's tool classes need a method __call__ with the arguments of a call (docs/agents.md); rows with "
            "agent_name=tool_agent need the same loop as generators.agents.tool_agent."
        )


def _classes(config: Translation, key: str, entries: str) -> list[dict[str, Any]] | None:
    """Read the classes that a file of tools or interactions names; None without a file."""
    if not (path := config.take(key)):
        return None
    if not str(path).endswith((".yaml", ".yml")) or not Path(path).is_file():
        config.note(key, "this file is not here: name its classes in generators.agent (docs/agents.md).")
        return []
    document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return [
        {"function": ":".join(each["class_name"].rsplit(".", 1)), "arguments": each.get("config") or {}}
        | ({"name": each["name"]} if "name" in each else {})
        for each in document[entries]
    ]


def _hardware(config: Translation) -> None:
    gpus = config.take("trainer.n_gpus_per_node") * config.take("trainer.nnodes")
    width = config.take(f"{_ROLLOUT}.tensor_model_parallel_size")
    width *= config.take(f"{_ROLLOUT}.pipeline_model_parallel_size") or 1
    if own := config.take("rollout.n_gpus_per_node"):
        # verl's asynchronous trainers use separate GPUs for generation.
        config.put("learner.num_ranks", gpus)
        config.put("generators.count", max(1, own * (config.take("rollout.nnodes") or 1) // width))
    else:
        config.put_shared_gpus("verl", gpus, engine_gpus=width)
    offloads = any(config.take_all(f"{_ACTOR}.fsdp_config", "param_offload", "optimizer_offload")) or None
    stage = 2 if config.ours["learner.num_ranks"] == "1" else 3
    config.put_all("learner.engine", zero_stage=stage, offload_optimizer=offloads)


def _staleness(config: Translation) -> None:
    key = "async_training.staleness_threshold"
    if config.take(key) is None and not config.below("async_training.trigger_parameter_sync_step"):
        config.put_synchronous()
        return
    lag = math.ceil(1 + (config.take(key) or 0))
    config.put("staleness.max_lag", lag)
    config.note(
        key, f"it bounds how much is generated ahead; staleness.max_lag={lag} bounds the versions of every token."
    )


def _schedule(config: Translation) -> None:
    total, epochs = config.take_all("trainer", "total_training_steps", "total_epochs")
    config.put("learner.max_steps" if total else "learner.epochs", total or epochs)
    key, warmup = f"{_ACTOR}.optim.lr_scheduler_type", f"{_ACTOR}.optim.lr_warmup_steps"
    config.put_schedule(key, warmup_steps=config.take(warmup), warmup_ratio=f"{warmup}_ratio", total=total)
    config.put_loggers(config.take("trainer.logger"), options={"project": "trainer.project_name"})
    config.put("mode", "evaluate" if config.take("trainer.val_only") else None)
    if (config.given.get("trainer.save_freq") or 0) < 0:
        config.note("trainer.save_freq", "a run always writes checkpoints, so that it can resume.")


def _reward(config: Translation) -> None:
    key, model = "reward.custom_reward_function", config.take("reward.reward_model.model_path")
    has_model = config.take("reward.reward_model.enable") and model
    if file := config.take(f"{key}.path"):
        config.put("generators.reward.function", f"{file}:{config.take(f'{key}.name') or 'compute_score'}")
        config.put("generators.reward.arguments", config.record(f"{key}.reward_kwargs") or None)
        if has_model:
            config.note("reward.reward_model.model_path", "generators.reward.functions can add reward_model to yours.")
    elif has_model:
        config.put_reward_model(model)
    else:
        config.put("generators.reward.function", "math_answer")
        config.notes.append(
            "verl chooses its grader by data_source: generators.reward.function=math_answer stands for all of them "
            "here; generators.reward.functions names one for each (docs/rewards.md)."
        )
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    if config.take(f"{key}.enable"):
        config.same(f"{key}.len", "algorithm.reward.overlong_buffer")


_PARTS = (_data, _batch, _advantage, _loss, _kl, _correction, _distillation, _agent, _hardware, _staleness, _schedule)
VERL = Trainer("verl.yaml", special=(*_PARTS, _reward))
