"""Translate settings of verl 0.9, with the defaults of its YAML files for settings that are not given."""

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


def translate_advantage(all_of: Translation) -> None:
    """Translate the advantage function, and the critic for GAE."""
    name = all_of.take("algorithm.adv_estimator")
    ours = _ADVANTAGES.get(name)
    if ours is None:
        all_of.notes.append(
            f"algorithm.adv_estimator={name}: there is no such advantage; algorithm/advantage=grpo stays."
        )
        return
    is_scaled = all_of.take("algorithm.norm_adv_by_std_in_grpo")
    ours = "dr_grpo" if ours == "grpo" and not is_scaled else ours
    all_of.put("algorithm/advantage", ours)
    gamma, lam = all_of.take("algorithm.gamma"), all_of.take("algorithm.lam")
    if ours in ("gae", "reinforce_plus_plus"):
        all_of.put("algorithm.advantage.gamma", float(gamma))
    if ours == "gae":
        all_of.put("algorithm.advantage.lam", float(lam))
        all_of.same("critic.model.path", "algorithm.critic.path")
        all_of.same("critic.optim.lr", "algorithm.critic.optimizer.learning_rate", float)
        all_of.same("critic.cliprange_value", "algorithm.critic.clip", float)
        all_of.same("trainer.critic_warmup", "algorithm.critic.warmup_steps")
    if ours == "remax":
        all_of.put("generators.baseline", "greedy")


def translate_loss(all_of: Translation) -> None:
    """Translate the policy loss and the aggregation of token losses."""
    name = all_of.take(f"{ACTOR}.policy_loss.loss_mode")
    ours = _LOSSES.get(name)
    if ours is None:
        all_of.notes.append(f"{ACTOR}.policy_loss.loss_mode={name}: there is no such loss; ppo_clip stays.")
        ours = "ppo_clip"
    all_of.put("algorithm/policy_loss", ours)
    both = all_of.take(f"{ACTOR}.clip_ratio")
    low, high = (
        both if all_of.take(f"{ACTOR}.clip_ratio_{side}") is None else all_of.take(f"{ACTOR}.clip_ratio_{side}")
        for side in ("low", "high")
    )
    cap = float(all_of.take(f"{ACTOR}.clip_ratio_c"))
    fields: dict[str, dict[str, Any]] = {
        "ppo_clip": {"clip_low": low, "clip_high": high, "dual_clip": cap},
        "gspo": {"clip_low": low, "clip_high": high},
        "gmpo": {"clip_low": low, "clip_high": high},
        "cispo": {"clip_low": low, "clip_high": high},
        "clip_cov": {"clip_low": low, "clip_high": high},
        "dppo": {"divergence": name.removeprefix("dppo_"), "low": low, "high": high, "ratio_cap": cap},
        "sapo": {"tau_positive": all_of.take(f"{ACTOR}.tau_pos"), "tau_negative": all_of.take(f"{ACTOR}.tau_neg")},
        "dro": {"beta": all_of.take(f"{ACTOR}.policy_loss.dro_beta")},
        "kl_cov": {
            "share": all_of.take(f"{ACTOR}.policy_loss.kl_cov_ratio"),
            "coefficient": all_of.take(f"{ACTOR}.policy_loss.ppo_kl_coef"),
        },
    }
    for field, value in fields.get(ours, {}).items():
        all_of.put(f"algorithm.policy_loss.{field}", value)
    # verl forces the sequence mean for these two losses.
    mode = "seq-mean-token-mean" if ours in ("gspo", "sapo") else all_of.take(f"{ACTOR}.loss_agg_mode")
    all_of.take(f"{ACTOR}.loss_agg_mode")
    all_of.put("algorithm.aggregation", mode.replace("-", "_"))
    all_of.same(f"{ACTOR}.loss_scale_factor", "algorithm.aggregation_length")
    all_of.same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", float)
    # Slipstream's default preset masks tokens by OPSM, which verl lacks.
    all_of.put("algorithm.masks", [])


def translate_kl(all_of: Translation) -> None:
    """Translate the KL penalty, in the loss or in the reward."""
    coefficient, kind = all_of.take(f"{ACTOR}.kl_loss_coef"), all_of.take(f"{ACTOR}.kl_loss_type")
    if all_of.take(f"{ACTOR}.use_kl_loss"):
        all_of.put("algorithm.kl.coefficient", float(coefficient))
        base = kind.removesuffix("+")
        all_of.put("algorithm.kl.estimator", _KL.get(base, base) + ("+" if kind.endswith("+") else ""))
    names = ("kl_coef", "target_kl", "horizon", "type")
    price, target, horizon, control = (all_of.take(f"algorithm.kl_ctrl.{name}") for name in names)
    penalty = all_of.take("algorithm.kl_penalty")
    if all_of.take("algorithm.use_kl_in_reward"):
        all_of.put("algorithm.kl.coefficient", float(price))
        all_of.put("algorithm.kl.estimator", _KL.get(penalty, penalty))
        all_of.put("algorithm.kl.charged_in", "reward")
        if control == "adaptive":
            all_of.put("algorithm.kl.adaptive", {"target": float(target), "horizon": int(horizon)})


def translate_correction(all_of: Translation) -> None:
    """Translate the importance correction and rejection of tokens."""
    key = "algorithm.rollout_correction"
    level, threshold = all_of.take(f"{key}.rollout_is"), all_of.take(f"{key}.rollout_is_threshold")
    rejections, bounds = all_of.take(f"{key}.rollout_rs"), all_of.take(f"{key}.rollout_rs_threshold")
    is_bypass = all_of.take(f"{key}.bypass_mode")
    all_of.put("algorithm/correction", "none")
    if level and not is_bypass:
        all_of.put("algorithm.correction.level", level)
        low, _, high = str(threshold).rpartition("_")
        all_of.put("algorithm.correction.high", float(high))
        if low:
            all_of.put("algorithm.correction.low", float(low))
            all_of.put("algorithm.correction.bound", "mask")
    if rejections:
        all_of.put("algorithm.correction.reject", [
            _rejection(name, bound) for name, bound in _paired(str(rejections), str(bounds))
        ])  # fmt: skip
    if all_of.take(f"{key}.rollout_is_batch_normalize"):
        all_of.put("algorithm.correction.normalise", True)
    if is_bypass:
        all_of.put("algorithm.proximal", "generator")
        if all_of.take(f"{key}.loss_type") == "reinforce":
            all_of.note(
                f"{key}.loss_type", "with a weight of its own: algorithm/policy_loss=reinforce, proximal=recompute."
            )


def _paired(names: str, bounds: str) -> list[tuple[str, str]]:
    options, values = names.split(","), bounds.split(",")
    return list(zip(options, values * len(options) if len(values) == 1 else values, strict=False))


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
    "hydra",
    "ray_",
    "transfer_queue",
    "global_profiler",
    "trainer.project_name",
    "trainer.device",
    "trainer.balance_batch",
    "trainer.resume_",
    "data.dataloader_num_workers",
    "data.return_",
    "data.val_batch_size",
    "data.reward_fn_key",
    "data.train_max_samples",
    f"{_ACTOR}.strategy",
    f"{_ACTOR}.use_dynamic_bsz",
    f"{_ACTOR}.ppo_micro_batch_size",
    f"{_ACTOR}.fsdp_config.",
    f"{_ACTOR}.use_torch_compile",
    f"{_MODEL}.use_remove_padding",
    f"{_MODEL}.use_fused_kernels",
    f"{_ROLLOUT}.log_prob_",
    f"{_ROLLOUT}.name",
    f"{_ROLLOUT}.mode",
    f"{_ROLLOUT}.free_cache_engine",
    f"{_ROLLOUT}.load_format",
    f"{_ROLLOUT}.calculate_log_probs",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.hybrid_engine",
)
"""Prefixes of keys that need no equivalent: Slipstream decides packing, placement, and log-prob recording itself."""


def import_verl(given: dict[str, Any]) -> Imported:
    """Translate a configuration of `verl.trainer.main_ppo` or of verl's asynchronous trainers. Raises ConfigError."""
    if not any(key.startswith(("actor_rollout_ref.", "algorithm.", "data.", "trainer.")) for key in given):
        raise ConfigError("FILE must hold settings of verl, such as actor_rollout_ref.model.path, got none of them.")
    all_of = Translation(given, _DEFAULTS)
    for translate in (_data, _model, _batch, translate_advantage, translate_loss, translate_kl, translate_correction):
        translate(all_of)
    for translate in (_optimizer, _rollout, _hardware, _staleness, _schedule, _reward):
        translate(all_of)
    return all_of.result(decided_here=_DECIDED_HERE)


def _data(all_of: Translation) -> None:
    if files := all_of.take("data.train_files"):
        names = list(each_file(files))
        all_of.put("data.train", names[0] if len(names) == 1 else [{"path": name} for name in names])
    if files := all_of.take("data.val_files"):
        samples, is_sampled = all_of.take(f"{_ROLLOUT}.val_kwargs.n"), all_of.take(f"{_ROLLOUT}.val_kwargs.do_sample")
        temperature = all_of.take(f"{_ROLLOUT}.val_kwargs.temperature") if is_sampled else 0.0
        sets = [
            {"name": _set_name(name, number), "path": name, "samples": samples, "temperature": float(temperature)}
            for number, name in enumerate(each_file(files))
        ]
        all_of.put("data.heldout", sets)
    prompt, response = all_of.take("data.max_prompt_length"), all_of.take("data.max_response_length")
    all_of.put("data.max_prompt_tokens", prompt)
    all_of.put("generators.sampling.max_tokens", response)
    budget = all_of.take(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    all_of.leave_default_task(max_length=prompt + response, tokens_per_microbatch=budget)
    drops = all_of.take("data.filter_overlong_prompts")
    all_of.put("data.too_long", "drop" if drops else "refuse")
    if all_of.take("data.truncation") != "error":
        all_of.note("data.truncation", "prompts are never cut; data.too_long refuses or drops long ones.")
    if all_of.take("data.shuffle") is False:
        all_of.note("data.shuffle", "prompts always come in an order that the seed decides.")
    if all_of.take("data.prompt_key") not in (None, "prompt"):
        all_of.note("data.prompt_key", "the column must be called prompt or question.")
    all_of.same("data.seed", "seed")


def _set_name(path: str, number: int) -> str:
    parts = Path(path).with_suffix("").parts[-2:]
    name = "".join(letter if letter.isalnum() or letter in "_.-" else "_" for letter in "_".join(parts)).strip("_.-")
    return f"{name or 'heldout'}"[:44] + (f"_{number}" if number else "")


def _model(all_of: Translation) -> None:
    all_of.same(f"{_MODEL}.path", "model.path")
    all_of.same(f"{_MODEL}.trust_remote_code", "model.trust_remote_code")
    all_of.same(f"{_ROLLOUT}.dtype", "model.dtype")
    if rank := all_of.take(f"{_MODEL}.lora_rank"):
        all_of.put("model.lora.rank", rank)
        all_of.put("model.lora.alpha", float(all_of.take(f"{_MODEL}.lora_alpha") or 16))
        all_of.same(f"{_MODEL}.target_modules", "model.lora.targets")
    all_of.note(f"{_MODEL}.custom_chat_template", "write the template into a file and name it: model.chat_template.")


def _batch(all_of: Translation) -> None:
    groups, mini = all_of.take("data.train_batch_size"), all_of.take(f"{_ACTOR}.ppo_mini_batch_size")
    all_of.put("learner.groups_per_step", groups or mini)
    if groups and groups > mini:
        all_of.put("algorithm.updates_per_step", groups // mini)
    if groups and groups > mini and groups % mini:
        all_of.notes.append(
            f"data.train_batch_size={groups} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}: a step is split "
            "into updates of one size."
        )
    if all_of.take(f"{_ACTOR}.ppo_epochs") > 1:
        all_of.note(
            f"{_ACTOR}.ppo_epochs", "a step passes over its batch once; buffer.reuse.max_uses trains again later."
        )
    if all_of.take("algorithm.filter_groups.enable"):
        all_of.put("buffer/filter", "zero_signal")
        all_of.note(
            "algorithm.filter_groups.metric",
            "groups are filtered by their rewards; buffer/filter=accuracy by right answers.",
        )


def _optimizer(all_of: Translation) -> None:
    key = f"{_ACTOR}.optim"
    all_of.same(f"{key}.lr", "learner.optimizer.learning_rate", float)
    all_of.same(f"{key}.weight_decay", "learner.optimizer.weight_decay", float)
    all_of.same(f"{key}.betas", "learner.optimizer.betas", list)
    all_of.same(f"{key}.clip_grad", "learner.optimizer.max_grad_norm", float)
    all_of.same(f"{_ACTOR}.grad_clip", "learner.optimizer.max_grad_norm", float)
    all_of.same(f"{key}.lr_scheduler_type", "learner.optimizer.schedule")
    steps, ratio = all_of.take(f"{key}.lr_warmup_steps"), all_of.take(f"{key}.lr_warmup_steps_ratio")
    if ratio and (steps is None or steps < 0):
        total = all_of.take("trainer.total_training_steps")
        steps = int(ratio * total) if total else 0
        if not total:
            all_of.note(f"{key}.lr_warmup_steps_ratio", "set learner.optimizer.warmup_steps, in steps.")
    all_of.put("learner.optimizer.warmup_steps", max(0, steps or 0))


def _rollout(all_of: Translation) -> None:
    all_of.same(f"{_ROLLOUT}.n", "generators.group_size")
    all_of.same(f"{_ROLLOUT}.temperature", "generators.sampling.temperature", float)
    all_of.same(f"{_ROLLOUT}.top_p", "generators.sampling.top_p", float)
    all_of.same(f"{_ROLLOUT}.top_k", "generators.sampling.top_k")
    engine = "generators.engine"
    all_of.put("generators/engine", "vllm_gpu")
    all_of.same(f"{_ROLLOUT}.tensor_model_parallel_size", f"{engine}.tensor_parallel_size")
    for theirs, ours in {
        "pipeline_model_parallel_size": "pipeline_parallel_size",
        "gpu_memory_utilization": "gpu_memory_utilization",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "max_num_seqs": "max_num_seqs",
        "enforce_eager": "enforce_eager",
        "enable_chunked_prefill": "chunked_prefill",
        "enable_prefix_caching": "enable_prefix_caching",
    }.items():
        all_of.same(f"{_ROLLOUT}.{theirs}", f"{engine}.{ours}")
    if all_of.take(f"{_ROLLOUT}.multi_turn.enable"):
        all_of.same(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "generators.agent.max_turns")
        all_of.notes.append(
            f"{_ROLLOUT}.multi_turn: choose generators/agent=tools or interaction and name the tools there."
        )


def _hardware(all_of: Translation) -> None:
    gpus = all_of.take("trainer.n_gpus_per_node") * all_of.take("trainer.nnodes")
    width = all_of.take(f"{_ROLLOUT}.tensor_model_parallel_size")
    own = all_of.take("rollout.n_gpus_per_node")
    if own:
        # verl's asynchronous trainers use separate GPUs for generation.
        rollouts, ranks = own * (all_of.take("rollout.nnodes") or 1), gpus
    else:
        rollouts, ranks = gpus - gpus // 2, max(1, gpus // 2)
        all_of.notes.append(
            f"{gpus} GPUs: verl takes turns on all of them; here {ranks} train while {rollouts} generate. Move the "
            "border with learner.num_ranks and generators.count; `slipstream plan` shows the memory."
        )
    is_offloaded = all_of.take(f"{_ACTOR}.fsdp_config.param_offload") or all_of.take(
        f"{_ACTOR}.fsdp_config.optimizer_offload"
    )
    stage = "deepspeed_zero3" if ranks > 1 else "deepspeed_zero2"
    all_of.put("learner/engine", f"{stage}_offload" if is_offloaded else stage)
    all_of.put("learner.num_ranks", ranks)
    all_of.put("learner.device", "cuda")
    all_of.put("generators.count", max(1, rollouts // width))
    all_of.same(f"{_ACTOR}.ulysses_sequence_parallel_size", "learner.sequence_parallel")
    all_of.same(f"{_MODEL}.enable_gradient_checkpointing", "learner.engine.gradient_checkpointing")
    all_of.same(f"{_MODEL}.enable_activation_offload", "learner.engine.offload_activations")


def _staleness(all_of: Translation) -> None:
    key = "async_training"
    threshold, every = all_of.take(f"{key}.staleness_threshold"), all_of.take(f"{key}.trigger_parameter_sync_step")
    if threshold is None and every is None:
        all_of.put("buffer.staleness.max_lag", 0)
        all_of.notes.append(
            "buffer.staleness.max_lag=0 is the synchronous training of this file: raise it, with a correction, to let "
            "generation and training overlap."
        )
        return
    lag = math.ceil(1 + (threshold or 0))
    all_of.put("buffer.staleness.max_lag", lag)
    all_of.note(
        f"{key}.staleness_threshold",
        f"it bounds how much is generated ahead; buffer.staleness.max_lag={lag} bounds the versions of every token.",
    )
    all_of.note(f"{key}.trigger_parameter_sync_step", "every step publishes; weights.publish_every_steps=N every Nth.")
    all_of.note(
        f"{key}.partial_rollout", "generation always goes on over an update, and every token keeps its version."
    )


def _schedule(all_of: Translation) -> None:
    total, epochs = all_of.take("trainer.total_training_steps"), all_of.take("trainer.total_epochs")
    if not total:
        rows = _count_rows(all_of.given.get("data.train_files"))
        groups = all_of.take("data.train_batch_size") or all_of.take(f"{_ACTOR}.ppo_mini_batch_size")
        total = rows // groups * epochs if rows else None
    if total:
        all_of.put("learner.max_steps", total)
    else:
        all_of.notes.append(f"trainer.total_epochs={epochs}: set learner.max_steps to rows / groups_per_step * epochs.")
    every = all_of.take("trainer.save_freq")
    all_of.put("learner.checkpoint.every_steps", every if every and every > 0 else None)
    all_of.same("trainer.max_actor_ckpt_to_keep", "learner.checkpoint.keep")
    every = all_of.take("trainer.test_freq")
    all_of.put("evaluation.every_steps", every if every and every > 0 else 0)
    all_of.same("trainer.val_before_train", "evaluation.before_training")
    all_of.same("trainer.val_only", "evaluation.only")
    all_of.same("trainer.experiment_name", "name", lambda name: str(name).replace("/", "_"))
    all_of.note("trainer.default_local_dir", "checkpoints lie in runs_dir/NAME/checkpoints.")
    all_of.note(
        "trainer.rollout_data_dir",
        "every trajectory is archived in runs_dir/NAME/archive; `slipstream view` reads both.",
    )


def _count_rows(files: Any) -> int:
    """Count the rows of local Parquet files; 0 if one cannot be read."""
    try:
        return sum(pq.read_metadata(name).num_rows for name in each_file(files)) if files else 0
    except (OSError, pa.ArrowException):
        return 0


def _reward(all_of: Translation) -> None:
    for prefix in ("reward.custom_reward_function", "custom_reward_function"):
        path, name = all_of.take(f"{prefix}.path"), all_of.take(f"{prefix}.name") or "compute_score"
        if path:
            all_of.put("generators.reward.function", f"{path}:{name}")
            start = f"{prefix}.reward_kwargs."
            arguments = {key.removeprefix(start): all_of.take(key) for key in all_of.given if key.startswith(start)}
            all_of.put("generators.reward.arguments", arguments or None)
            break
    else:
        all_of.put("generators.reward.function", "math_answer")
        all_of.notes.append(
            "verl chooses its grader by data_source: generators.reward.function=math_answer stands for all of them "
            "here; generators.reward.functions names one for each (docs/rewards.md)."
        )
    for prefix in ("reward.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        if all_of.take(f"{prefix}.enable"):
            all_of.same(f"{prefix}.len", "algorithm.reward.overlong_buffer")
            if all_of.take(f"{prefix}.penalty_factor") not in (None, 1, 1.0):
                all_of.note(f"{prefix}.penalty_factor", "the penalty reaches 1 at the longest response.")
