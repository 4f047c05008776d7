"""Plan: one run of the comparison, and the methods, lags, replay factors, and seeds that plans combine."""

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import msgspec

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.load import convert, load
from slipstream.configs.run import RunConfig

LAGS = (0, 4, 8, 16)
LAG_STEPS, REPLAY_STEPS = 800, 120
_REPLAYED_METHODS = ("none", "token_tis")
_ANSWER_TOKENS = 6
"""Five digits and the end token."""


class Plan(NamedTuple):
    """Settings that distinguish one run from another."""

    method: str
    """Key of METHODS."""
    lag: int
    """Versions by which the generator lags behind the learner."""
    replay: int
    """Steps on replayed batches after each fresh one."""
    seed: int
    """Seed of prompts and sampling."""
    steps: int
    """Fresh batches of the run."""
    groups: int
    learning_rate: float
    """For one optimizer update per step; Method.rate scales it for other methods."""


class Method(NamedTuple):
    """A row of the table."""

    title: str
    algorithm: dict[str, Any]
    """Settings of AlgorithmConfig that differ from the defaults."""
    rate: float = 1.0
    """Factor on the learning rate, because several updates per step must each be smaller."""


_UNWEIGHTED = {"level": "none", "max_weight": None}
_TOKEN_TIS = {"level": "token", "max_weight": 2.0}
_REINFORCE = {"policy_loss": {"kind": "reinforce"}, "proximal": "reuse"}
_AROUND_GENERATOR = {"correction": _UNWEIGHTED, "proximal": "generator"}
_CLIP = {"policy_loss": {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}}
_DPPO = {"policy_loss": {"kind": "dppo", "clip_low": 0.2, "clip_high": 0.2}}
_OPSM = {
    "policy_loss": {"kind": "ppo_clip"},
    "masks": [{"kind": "opsm"}],
    "correction": _TOKEN_TIS,
    "proximal": "reuse",
}
_SLOW_REFERENCE = {"coef": 0.02, "estimator": "k3_st", "refresh_every_steps": 40}
_FOUR_UPDATES = {"policy_loss": {"kind": "ppo_clip"}, "proximal": "recompute", "updates_per_step": 4}

METHODS = {
    "none": Method("no correction", _REINFORCE | {"correction": _UNWEIGHTED}),
    "naive_ppo": Method("naive PPO, recomputed", _FOUR_UPDATES | {"correction": _UNWEIGHTED}, rate=0.5),
    "token_tis": Method("token TIS", _REINFORCE | {"correction": _TOKEN_TIS}),
    "decoupled_ppo": Method("decoupled PPO", _FOUR_UPDATES | {"correction": _TOKEN_TIS}, rate=0.5),
    "icepop": Method(
        "IcePop",
        _REINFORCE | {"correction": {"level": "token", "outside": "mask", "min_weight": 0.5, "max_weight": 5.0}},
    ),
    "gspo": Method("GSPO", _AROUND_GENERATOR | {"policy_loss": {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2}}),
    "cispo": Method("CISPO", _AROUND_GENERATOR | {"policy_loss": {"kind": "cispo"}}),
    "dppo": Method("DPPO", _AROUND_GENERATOR | _DPPO),
    "m2po": Method("M2PO", _AROUND_GENERATOR | {"policy_loss": {"kind": "unclipped"}, "masks": [{"kind": "m2po"}]}),
    "topr": Method("TOPR", _AROUND_GENERATOR | {"policy_loss": {"kind": "topr"}}),
    "opsm": Method("OPSM", _OPSM),
    "tis_1": Method("token TIS up to 1", _REINFORCE | {"correction": {"level": "token", "max_weight": 1.0}}),
    "tis_geometric": Method(
        "token TIS, geometric rejection",
        _REINFORCE
        | {"correction": _TOKEN_TIS | {"reject": [{"statistic": "k1", "over": "mean", "low": 0.5, "high": 2.0}]}},
    ),
    "tis_kl": Method(
        "token TIS, KL to a slow reference", _REINFORCE | {"correction": _TOKEN_TIS, "kl": _SLOW_REFERENCE}
    ),
    "clip_generator": Method("clip around the generator", _AROUND_GENERATOR | _CLIP),
    "clip_generator_dual": Method(
        "clip around the generator, dual clip 3",
        _AROUND_GENERATOR | {"policy_loss": _CLIP["policy_loss"] | {"dual_clip": 3.0}},
    ),
    "clip_kl": Method(
        "clip around the generator, KL to a slow reference", _AROUND_GENERATOR | _CLIP | {"kl": _SLOW_REFERENCE}
    ),
    "dppo_kl": Method("DPPO, KL to a slow reference", _AROUND_GENERATOR | _DPPO | {"kl": _SLOW_REFERENCE}),
    "dppo_penalty": Method(
        "DPPO, penalty 0.01", _AROUND_GENERATOR | _DPPO | {"correction": _UNWEIGHTED | {"log_ratio_penalty": 0.01}}
    ),
    "opsm_kl": Method("OPSM, KL to a slow reference", _OPSM | {"kl": _SLOW_REFERENCE}),
    "opsm_penalty": Method("OPSM, penalty 0.01", _OPSM | {"correction": _TOKEN_TIS | {"log_ratio_penalty": 0.01}}),
    "opsm_penalty_3": Method("OPSM, penalty 0.03", _OPSM | {"correction": _TOKEN_TIS | {"log_ratio_penalty": 0.03}}),
    # The default algorithm of a run.
    "default": Method(
        "OPSM at 0.2, penalty 0.01 (default)",
        _OPSM | {"masks": [{"kind": "opsm", "delta": 0.2}], "correction": _TOKEN_TIS | {"log_ratio_penalty": 0.01}},
    ),
}
"""Name on the command line -> method."""


def make_plans(arguments: argparse.Namespace) -> Iterator[Plan]:
    """Combine methods, lags or replay factors, and seeds."""
    methods = arguments.methods or (_REPLAYED_METHODS if arguments.replay else tuple(METHODS))
    if unknown := [name for name in methods if name not in METHODS]:
        raise ConfigError(f"--methods must be of {', '.join(METHODS)}, got {', '.join(unknown)}.")
    lags = (0,) if arguments.replay else arguments.lags
    steps = arguments.steps or (REPLAY_STEPS if arguments.replay else LAG_STEPS)
    # Seeds in the outer loop, so that the table fills evenly.
    for seed, lag, replay, method in product(arguments.seeds, lags, arguments.replay or (0,), methods):
        yield Plan(method, lag, replay, seed, steps, arguments.groups, arguments.learning_rate)


def make_config(plan: Plan, *, model: str) -> RunConfig:
    """Configure the digits task with the plan's algorithm and a constant learning rate."""
    method = METHODS[plan.method]
    run = load(
        [
            "experiment=digits_cpu",
            "learner/engine=torch",
            "learner.device=cpu",
            f"model.path={model}",
            f"seed={plan.seed}",
            f"learner.prompts_per_step={plan.groups}",
            f"learner.max_steps={plan.steps}",
            f"learner.optimizer.learning_rate={plan.learning_rate * method.rate}",
            "learner.optimizer.schedule=constant",
            "learner.optimizer.warmup_steps=0",
            "learner.tokens_per_microbatch=4096",
            f"generators.sampling.max_tokens={_ANSWER_TOKENS}",
        ]
    )
    return msgspec.structs.replace(run, algorithm=convert(method.algorithm, AlgorithmConfig))
