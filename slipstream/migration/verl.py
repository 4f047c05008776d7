"""Translate settings of verl 0.9, with the defaults of its YAML files."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.configs.base import ConfigError
from slipstream.migration.translation import Imported, Translation, each_file

ACTOR = "actor_rollout_ref.actor"
_ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "grpo_passk",
    "gdpo": "gdpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "optimal_token_baseline": "optimal_token_baseline",
}
_LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "reinforce",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "dro": "dro",
    "cispo": "cispo",
}
_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def translate_advantage(config: Translation) -> None:
    """Translate the advantage function, and the critic for GAE."""
    name = config.take("algorithm.adv_estimator")
    ours = _ADVANTAGES.get(name)
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
        config.put("algorithm.advantage.gamma", float(gamma))
    if ours == "gae":
        config.put("algorithm.advantage.lam", float(lam))
        config.same("critic.model.path", "algorithm.critic.path")
        config.same("critic.optim.lr", "algorithm.critic.optimizer.learning_rate", float)
        config.same("critic.cliprange_value", "algorithm.critic.value_clip", float)
        config.same("trainer.critic_warmup", "algorithm.critic.warmup_steps")
    if ours == "remax":
        config.put("generators.baseline", "greedy")


def translate_loss(config: Translation) -> None:
    """Translate the policy loss and the aggregation of token losses."""
    name = config.take(f"{ACTOR}.policy_loss.loss_mode")
    ours = _LOSSES.get(name)
    if ours is None:
        config.notes.append(f"{ACTOR}.policy_loss.loss_mode={name}: there is no such loss; ppo_clip stays.")
        ours = "ppo_clip"
    config.put("algorithm/policy_loss", ours)
    both = config.take(f"{ACTOR}.clip_ratio")
    low, high = (
        both if config.take(f"{ACTOR}.clip_ratio_{side}") is None else config.take(f"{ACTOR}.clip_ratio_{side}")
        for side in ("low", "high")
    )
    cap = float(config.take(f"{ACTOR}.clip_ratio_c"))
    fields: dict[str, dict[str, Any]] = {
        "ppo_clip": {"clip_low": low, "clip_high": high, "dual_clip": cap},
        "gspo": {"clip_low": low, "clip_high": high},
        "gmpo": {"clip_low": low, "clip_high": high},
        "cispo": {"clip_low": low, "clip_high": high},
        "clip_cov": {"clip_low": low, "clip_high": high},
        "dppo": {"divergence": name.removeprefix("dppo_"), "clip_low": low, "clip_high": high, "ratio_cap": cap},
        "sapo": {"tau_positive": config.take(f"{ACTOR}.tau_pos"), "tau_negative": config.take(f"{ACTOR}.tau_neg")},
        "dro": {"beta": config.take(f"{ACTOR}.policy_loss.dro_beta")},
        "kl_cov": {
            "fraction": config.take(f"{ACTOR}.policy_loss.kl_cov_ratio"),
            "coef": config.take(f"{ACTOR}.policy_loss.ppo_kl_coef"),
        },
    }
    for field, value in fields.get(ours, {}).items():
        config.put(f"algorithm.policy_loss.{field}", value)
    # verl forces the sequence mean for these two losses.
    mode = "seq-mean-token-mean" if ours in ("gspo", "sapo") else config.take(f"{ACTOR}.loss_agg_mode")
    config.take(f"{ACTOR}.loss_agg_mode")
    config.put("algorithm.loss_aggregation", mode.replace("-", "_"))
    config.same(f"{ACTOR}.loss_scale_factor", "algorithm.loss_aggregation_length")
    config.same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", float)
    # Slipstream's default preset masks tokens by OPSM, which verl lacks.
    config.put("algorithm.masks", [])


def translate_kl(config: Translation) -> None:
    """Translate the KL penalty, in the loss or in the reward."""
    coefficient, kind = config.take(f"{ACTOR}.kl_loss_coef"), config.take(f"{ACTOR}.kl_loss_type")
    if config.take(f"{ACTOR}.use_kl_loss"):
        config.put("algorithm.kl.coef", float(coefficient))
        base = kind.removesuffix("+")
        config.put("algorithm.kl.estimator", _KL.get(base, base) + ("+" if kind.endswith("+") else ""))
    names = ("kl_coef", "target_kl", "horizon", "type")
    price, target, horizon, control = (config.take(f"algorithm.kl_ctrl.{name}") for name in names)
    penalty = config.take("algorithm.kl_penalty")
    if config.take("algorithm.use_kl_in_reward"):
        config.put("algorithm.kl.coef", float(price))
        config.put("algorithm.kl.estimator", _KL.get(penalty, penalty))
        config.put("algorithm.kl.apply_to", "reward")
        if control == "adaptive":
            config.put("algorithm.kl.adaptive", {"target": float(target), "horizon": int(horizon)})


def translate_correction(config: Translation) -> None:
    """Translate importance correction and rejection."""
    key = "algorithm.rollout_correction"
    level, threshold = config.take(f"{key}.rollout_is"), config.take(f"{key}.rollout_is_threshold")
    rejections, bounds = config.take(f"{key}.rollout_rs"), config.take(f"{key}.rollout_rs_threshold")
    is_bypass = config.take(f"{key}.bypass_mode")
    config.put("algorithm/correction", "none")
    if level and not is_bypass:
        config.put("algorithm.correction.level", level)
        low, _, high = str(threshold).rpartition("_")
        config.put("algorithm.correction.max_weight", float(high))
        if low:
            config.put("algorithm.correction.min_weight", float(low))
            config.put("algorithm.correction.outside", "mask")
    if rejections:
        names, limits = str(rejections).split(","), str(bounds).split(",")
        limits = limits * len(names) if len(limits) == 1 else limits
        rejects = [_rejection(name, bound) for name, bound in zip(names, limits, strict=False)]
        config.put("algorithm.correction.reject", rejects)
    if config.take(f"{key}.rollout_is_batch_normalize"):
        config.put("algorithm.correction.normalize", True)
    if is_bypass:
        config.put("algorithm.proximal", "generator")
        if config.take(f"{key}.loss_type") == "reinforce":
            config.note(
                f"{key}.loss_type", "with a weight of its own: algorithm/policy_loss=reinforce, proximal=recompute."
            )


def _rejection(name: str, bound: str) -> dict[str, Any]:
    """Translate `seq_mean_k3` with `0.01`, or `token_k1` with `0.5_2.0`."""
    level, *rest = name.strip().split("_")
    over = "token" if level == "token" else rest[0]
    low, _, high = bound.strip().rpartition("_")
    return {"statistic": rest[-1], "over": over} | ({"low": float(low)} if low else {}) | {"high": float(high)}


_ACTOR, _ROLLOUT, _MODEL = ACTOR, "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    "data.truncation": "error",
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.tau_pos": 1.0,
    f"{_ACTOR}.tau_neg": 1.05,
    f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.betas": [0.9, 0.999],
    f"{_ACTOR}.optim.clip_grad": 1.0,
    f"{_ACTOR}.optim.lr_scheduler_type": "constant",
    f"{_MODEL}.enable_gradient_checkpointing": True,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_p": 1.0,
    f"{_ROLLOUT}.top_k": -1,
    f"{_ROLLOUT}.dtype": "bfloat16",
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    f"{_ROLLOUT}.val_kwargs.n": 1,
    f"{_ROLLOUT}.val_kwargs.temperature": 0.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
}
_DECIDED_HERE = (
    "hydra", "ray_", "transfer_queue", "global_profiler", "trainer.project_name", "trainer.device",
    "trainer.balance_batch", "trainer.resume_", "data.dataloader_num_workers", "data.return_", "data.val_batch_size",
    "data.reward_fn_key", "data.train_max_samples", f"{_ACTOR}.strategy", f"{_ACTOR}.use_dynamic_bsz",
    f"{_ACTOR}.ppo_micro_batch_size", f"{_ACTOR}.fsdp_config.", f"{_ACTOR}.use_torch_compile",
    f"{_MODEL}.use_remove_padding", f"{_MODEL}.use_fused_kernels", f"{_ROLLOUT}.log_prob_", f"{_ROLLOUT}.name",
    f"{_ROLLOUT}.mode", f"{_ROLLOUT}.free_cache_engine", f"{_ROLLOUT}.load_format", f"{_ROLLOUT}.calculate_log_probs",
    "actor_rollout_ref.ref.", "actor_rollout_ref.hybrid_engine",
)  # fmt: skip
"""Prefixes of keys that Slipstream decides itself."""


def import_verl(given: dict[str, Any]) -> Imported:
    """Translate settings of `verl.trainer.main_ppo` or verl's asynchronous trainers. Raises ConfigError."""
    if not any(key.startswith(("actor_rollout_ref.", "algorithm.", "data.", "trainer.")) for key in given):
        raise ConfigError("FILE must hold settings of verl, such as actor_rollout_ref.model.path, got none of them.")
    config = Translation(given, _DEFAULTS)
    for translate in (_data, _model, _batch, translate_advantage, translate_loss, translate_kl, translate_correction):
        translate(config)
    for translate in (_optimizer, _rollout, _hardware, _staleness, _schedule, _reward):
        translate(config)
    return config.result(decided_here=_DECIDED_HERE)


def _data(config: Translation) -> None:
    if files := config.take("data.train_files"):
        names = list(each_file(files))
        config.put("data.train", names[0] if len(names) == 1 else [{"path": name} for name in names])
    if files := config.take("data.val_files"):
        samples, is_sampled = config.take(f"{_ROLLOUT}.val_kwargs.n"), config.take(f"{_ROLLOUT}.val_kwargs.do_sample")
        temperature = config.take(f"{_ROLLOUT}.val_kwargs.temperature") if is_sampled else 0.0
        sets = [
            {"name": _set_name(name, number), "path": name, "samples": samples, "temperature": float(temperature)}
            for number, name in enumerate(each_file(files))
        ]
        config.put("data.eval", sets)
    prompt, response = config.take("data.max_prompt_length"), config.take("data.max_response_length")
    config.put("data.max_prompt_tokens", prompt)
    config.put("generators.sampling.max_tokens", response)
    budget = config.take(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    config.put("model.max_length", prompt + response)
    config.put("learner.tokens_per_microbatch", max(prompt + response, budget))
    drops = config.take("data.filter_overlong_prompts")
    config.put("data.on_too_long", "skip" if drops else "error")
    if config.take("data.truncation") != "error":
        config.note("data.truncation", "prompts are never cut; data.on_too_long refuses or skips long ones.")
    if config.take("data.shuffle") is False:
        config.note("data.shuffle", "prompts always come in an order that the seed decides.")
    if config.take("data.prompt_key") not in (None, "prompt"):
        config.note("data.prompt_key", "the column must be called prompt or question.")
    config.same("data.seed", "seed")


def _set_name(path: str, number: int) -> str:
    parts = Path(path).with_suffix("").parts[-2:]
    name = "".join(letter if letter.isalnum() or letter in "_.-" else "_" for letter in "_".join(parts)).strip("_.-")
    return f"{name or 'heldout'}"[:44] + (f"_{number}" if number else "")


def _model(config: Translation) -> None:
    config.same(f"{_MODEL}.path", "model.path")
    config.same(f"{_MODEL}.trust_remote_code", "model.trust_remote_code")
    config.same(f"{_ROLLOUT}.dtype", "model.dtype")
    if rank := config.take(f"{_MODEL}.lora_rank"):
        config.put("model.lora.rank", rank)
        config.put("model.lora.alpha", float(config.take(f"{_MODEL}.lora_alpha") or 16))
        config.same(f"{_MODEL}.target_modules", "model.lora.targets")
    config.note(f"{_MODEL}.custom_chat_template", "write the template into a file and name it: model.chat_template.")


def _batch(config: Translation) -> None:
    groups, mini = config.take("data.train_batch_size"), config.take(f"{_ACTOR}.ppo_mini_batch_size")
    config.put("learner.prompts_per_step", groups or mini)
    if groups and groups > mini:
        config.put("algorithm.updates_per_step", groups // mini)
    if groups and groups > mini and groups % mini:
        config.notes.append(
            f"data.train_batch_size={groups} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}: a step is split "
            "into updates of one size."
        )
    if config.take(f"{_ACTOR}.ppo_epochs") > 1:
        config.note(
            f"{_ACTOR}.ppo_epochs", "a step passes over its batch once; buffer.reuse.max_uses trains again later."
        )
    if config.take("algorithm.filter_groups.enable"):
        config.put("buffer/filter", "zero_advantage")
        config.note(
            "algorithm.filter_groups.metric",
            "groups are filtered by their rewards; buffer/filter=accuracy by right answers.",
        )


def _optimizer(config: Translation) -> None:
    key = f"{_ACTOR}.optim"
    config.same(f"{key}.lr", "learner.optimizer.learning_rate", float)
    config.same(f"{key}.weight_decay", "learner.optimizer.weight_decay", float)
    config.same(f"{key}.betas", "learner.optimizer.betas", list)
    config.same(f"{key}.clip_grad", "learner.optimizer.max_grad_norm", float)
    config.same(f"{_ACTOR}.grad_clip", "learner.optimizer.max_grad_norm", float)
    config.same(f"{key}.lr_scheduler_type", "learner.optimizer.schedule")
    steps, ratio = config.take(f"{key}.lr_warmup_steps"), config.take(f"{key}.lr_warmup_steps_ratio")
    if ratio and (steps is None or steps < 0):
        total = config.take("trainer.total_training_steps")
        steps = int(ratio * total) if total else 0
        if not total:
            config.note(f"{key}.lr_warmup_steps_ratio", "set learner.optimizer.warmup_steps, in steps.")
    config.put("learner.optimizer.warmup_steps", max(0, steps or 0))


def _rollout(config: Translation) -> None:
    config.same(f"{_ROLLOUT}.n", "generators.group_size")
    config.same(f"{_ROLLOUT}.temperature", "generators.sampling.temperature", float)
    config.same(f"{_ROLLOUT}.top_p", "generators.sampling.top_p", float)
    config.same(f"{_ROLLOUT}.top_k", "generators.sampling.top_k")
    engine = "generators.engine"
    config.put("generators/engine", "vllm_gpu")
    config.same(f"{_ROLLOUT}.tensor_model_parallel_size", f"{engine}.tensor_parallel_size")
    for theirs, ours in {
        "pipeline_model_parallel_size": "pipeline_parallel_size",
        "gpu_memory_utilization": "gpu_memory_utilization",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "max_num_seqs": "max_num_seqs",
        "enforce_eager": "enforce_eager",
        "enable_chunked_prefill": "chunked_prefill",
        "enable_prefix_caching": "enable_prefix_caching",
    }.items():
        config.same(f"{_ROLLOUT}.{theirs}", f"{engine}.{ours}")
    if config.take(f"{_ROLLOUT}.multi_turn.enable"):
        config.same(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "generators.agent.max_turns")
        config.notes.append(
            f"{_ROLLOUT}.multi_turn: choose generators/agent=tools or interaction and name the tools there."
        )


def _hardware(config: Translation) -> None:
    gpus = config.take("trainer.n_gpus_per_node") * config.take("trainer.nnodes")
    width = config.take(f"{_ROLLOUT}.tensor_model_parallel_size")
    own = config.take("rollout.n_gpus_per_node")
    if own:
        # verl's asynchronous trainers use separate GPUs for generation.
        rollouts, ranks = own * (config.take("rollout.nnodes") or 1), gpus
    else:
        rollouts, ranks = gpus - gpus // 2, max(1, gpus // 2)
        config.notes.append(
            f"{gpus} GPUs: verl takes turns on all of them; here {ranks} train while {rollouts} generate. Move the "
            "border with learner.num_ranks and generators.count; `slipstream plan` shows the memory."
        )
    is_offloaded = config.take(f"{_ACTOR}.fsdp_config.param_offload") or config.take(
        f"{_ACTOR}.fsdp_config.optimizer_offload"
    )
    stage = "deepspeed_zero3" if ranks > 1 else "deepspeed_zero2"
    config.put("learner/engine", f"{stage}_offload" if is_offloaded else stage)
    config.put("learner.num_ranks", ranks)
    config.put("learner.device", "cuda")
    config.put("generators.count", max(1, rollouts // width))
    config.same(f"{_ACTOR}.ulysses_sequence_parallel_size", "learner.sequence_parallel")
    config.same(f"{_MODEL}.enable_gradient_checkpointing", "learner.engine.gradient_checkpointing")
    config.same(f"{_MODEL}.enable_activation_offload", "learner.engine.offload_activations")


def _staleness(config: Translation) -> None:
    key = "async_training"
    threshold, every = config.take(f"{key}.staleness_threshold"), config.take(f"{key}.trigger_parameter_sync_step")
    if threshold is None and every is None:
        config.put("staleness.max_lag", 0)
        config.notes.append(
            "staleness.max_lag=0 is the synchronous training of this file: raise it, with a correction, to let "
            "generation and training overlap."
        )
        return
    lag = math.ceil(1 + (threshold or 0))
    config.put("staleness.max_lag", lag)
    config.note(
        f"{key}.staleness_threshold",
        f"it bounds how much is generated ahead; staleness.max_lag={lag} bounds the versions of every token.",
    )
    config.note(f"{key}.trigger_parameter_sync_step", "every step publishes; weights.publish_every_steps=N every Nth.")
    config.note(
        f"{key}.partial_rollout", "generation always goes on over an update, and every token keeps its version."
    )


def _schedule(config: Translation) -> None:
    total, epochs = config.take("trainer.total_training_steps"), config.take("trainer.total_epochs")
    if not total:
        rows = _count_rows(config.given.get("data.train_files"))
        groups = config.take("data.train_batch_size") or config.take(f"{_ACTOR}.ppo_mini_batch_size")
        total = rows // groups * epochs if rows else None
    if total:
        config.put("learner.max_steps", total)
    else:
        config.notes.append(
            f"trainer.total_epochs={epochs}: set learner.max_steps to rows / prompts_per_step * epochs."
        )
    every = config.take("trainer.save_freq")
    config.put("learner.checkpoint.every_steps", every if every and every > 0 else None)
    config.same("trainer.max_actor_ckpt_to_keep", "learner.checkpoint.keep")
    every = config.take("trainer.test_freq")
    config.put("evaluation.every_steps", every if every and every > 0 else 0)
    config.same("trainer.val_before_train", "evaluation.before_training")
    config.same("trainer.val_only", "evaluation.only")
    config.same("trainer.experiment_name", "name", lambda name: str(name).replace("/", "_"))
    config.note("trainer.default_local_dir", "checkpoints lie in runs_dir/NAME/checkpoints.")
    config.note(
        "trainer.rollout_data_dir",
        "every trajectory is archived in runs_dir/NAME/archive; `slipstream view` reads both.",
    )


def _count_rows(files: Any) -> int:
    try:
        return sum(pq.read_metadata(name).num_rows for name in each_file(files)) if files else 0
    except (OSError, pa.ArrowException):
        return 0


def _reward(config: Translation) -> None:
    for prefix in ("reward.custom_reward_function", "custom_reward_function"):
        path, name = config.take(f"{prefix}.path"), config.take(f"{prefix}.name") or "compute_score"
        if path:
            config.put("generators.reward.function", f"{path}:{name}")
            start = f"{prefix}.reward_kwargs."
            arguments = {key.removeprefix(start): config.take(key) for key in config.given if key.startswith(start)}
            config.put("generators.reward.arguments", arguments or None)
            break
    else:
        config.put("generators.reward.function", "math_answer")
        config.notes.append(
            "verl chooses its grader by data_source: generators.reward.function=math_answer stands for all of them "
            "here; generators.reward.functions names one for each (docs/rewards.md)."
        )
    for prefix in ("reward.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        if config.take(f"{prefix}.enable"):
            config.same(f"{prefix}.len", "algorithm.reward.overlong_buffer")
            if config.take(f"{prefix}.penalty_factor") not in (None, 1, 1.0):
                config.note(f"{prefix}.penalty_factor", "the penalty reaches 1 at the longest response.")
