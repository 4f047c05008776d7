"""How old tokens are: lag of a token = learner's version - the version that sampled it."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from buffer.trajectory import Trajectory


def lag(versions: np.ndarray, learner_version: int) -> np.ndarray:
    """Versions (of model-written tokens) -> lags, same shape.

    Negative after the learner went back to an older checkpoint: such tokens count as fresh.
    """
    return learner_version - versions


def over_age_mask(trajectory: Trajectory, *, learner_version: int, max_lag: int) -> np.ndarray:
    """bool[T]: true where the model wrote the token and it is older than `max_lag` versions."""
    too_old = lag(trajectory.token_versions(), learner_version) > max_lag
    return too_old & trajectory.model_mask


def lag_histogram(trajectories: Iterable[Trajectory], *, learner_version: int) -> dict[int, int]:
    """Lag -> number of model-written tokens, in rising order of lag."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        versions = trajectory.token_versions()[trajectory.model_mask]
        lags, tokens = np.unique(lag(versions, learner_version), return_counts=True)
        counts.update(dict(zip(lags.tolist(), tokens.tolist(), strict=True)))
    return dict(sorted(counts.items()))
