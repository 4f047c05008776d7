"""Methods that benchmarks.staleness compares: what each changes in the algorithm's settings."""

from typing import Any, NamedTuple


class Method(NamedTuple):
    """One line of the table."""

    title: str
    """As the table has it."""
    algorithm: dict[str, Any]
    """Settings of AlgorithmConfig that are not the defaults."""
    rate: float = 1.0
    """Factor of the learning rate: several updates of a step are smaller ones."""


_UNWEIGHTED = {"level": "none"}
_TOKEN_TIS = {"level": "token", "high": 2.0}
_REINFORCE = {"policy_loss": {"kind": "reinforce"}, "proximal": "reuse"}
_AROUND_GENERATOR = {"correction": _UNWEIGHTED, "proximal": "generator"}
_FOUR_UPDATES = {"policy_loss": {"kind": "ppo_clip"}, "proximal": "recompute", "updates_per_step": 4}

METHODS = {
    "none": Method("no correction", _REINFORCE | {"correction": _UNWEIGHTED}),
    "naive_ppo": Method("naive PPO, recomputed", _FOUR_UPDATES | {"correction": _UNWEIGHTED}, rate=0.5),
    "token_tis": Method("token TIS", _REINFORCE | {"correction": _TOKEN_TIS}),
    "decoupled_ppo": Method("decoupled PPO", _FOUR_UPDATES | {"correction": _TOKEN_TIS}, rate=0.5),
    "icepop": Method(
        "IcePop", _REINFORCE | {"correction": {"level": "token", "bound": "mask", "low": 0.5, "high": 5.0}}
    ),
    "gspo": Method("GSPO", _AROUND_GENERATOR | {"policy_loss": {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2}}),
    "cispo": Method("CISPO", _AROUND_GENERATOR | {"policy_loss": {"kind": "cispo"}}),
    "dppo": Method("DPPO", _AROUND_GENERATOR | {"policy_loss": {"kind": "dppo"}}),
    "m2po": Method("M2PO", _AROUND_GENERATOR | {"policy_loss": {"kind": "unclipped"}, "masks": [{"kind": "m2po"}]}),
    "topr": Method("TOPR", _AROUND_GENERATOR | {"policy_loss": {"kind": "topr"}}),
    "opsm": Method(
        "OPSM",
        {
            "policy_loss": {"kind": "ppo_clip"},
            "masks": [{"kind": "opsm"}],
            "correction": _TOKEN_TIS,
            "proximal": "reuse",
        },
    ),
}
"""Name on the command line -> method."""
