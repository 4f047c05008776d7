"""The objective of verl 0.9, translated: advantage, policy loss, KL and rollout correction."""

from typing import Any

from slipstream.migration.translation import Translation

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
    """Choose the advantage function, with the critic of GAE."""
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
    """Choose the policy loss and the reduction of its tokens."""
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
    # verl's own losses force the mean over sequences for these two.
    mode = "seq-mean-token-mean" if ours in ("gspo", "sapo") else all_of.take(f"{ACTOR}.loss_agg_mode")
    all_of.take(f"{ACTOR}.loss_agg_mode")
    all_of.put("algorithm.aggregation", mode.replace("-", "_"))
    all_of.same(f"{ACTOR}.loss_scale_factor", "algorithm.aggregation_length")
    all_of.same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", float)
    # The default run masks tokens by OPSM; verl has no such mask.
    all_of.put("algorithm.masks", [])


def translate_kl(all_of: Translation) -> None:
    """Charge the divergence from the reference, in the loss or in the reward."""
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
    """Weigh and reject tokens by how far the learner is from the generator."""
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
