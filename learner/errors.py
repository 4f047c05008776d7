"""Errors of the learner."""


class LearnerError(Exception):
    """Root of the errors that the learner raises."""


class ModelError(LearnerError, ValueError):
    """The initial checkpoint cannot be loaded."""


class TrainEngineError(LearnerError, RuntimeError):
    """The training engine cannot start; the message names the setting to change."""


class BatchError(LearnerError, ValueError):
    """A trajectory that the broker accepted cannot be trained on: generator and learner disagree about the model."""


class DivergenceError(LearnerError, ArithmeticError):
    """A loss, a gradient norm, or the state that an update left is not finite. Nothing of that step may be saved."""


class SampledLogprobsError(LearnerError, ArithmeticError):
    """The generators' log-probabilities of the first step's tokens are not those of the policy."""


class CheckpointError(LearnerError, ValueError):
    """A checkpoint is missing, damaged, or does not fit the run."""


class RankGroupError(LearnerError, ConnectionError):
    """The learner's ranks cannot form a group, or one of them is gone."""


class DeadEndError(LearnerError, TimeoutError):
    """A wait has come to a dead end; the message holds the cause, the remedy, and the last events."""
