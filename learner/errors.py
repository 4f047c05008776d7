"""Errors of the learner."""


class LearnerError(Exception):
    """Base class of the learner's errors."""


class ModelError(LearnerError, ValueError):
    """The initial checkpoint cannot be loaded."""


class TrainEngineError(LearnerError, RuntimeError):
    """The training engine cannot start. The message names the setting to change."""


class BatchError(LearnerError, ValueError):
    """Generator and learner disagree about the model, so an accepted trajectory cannot be trained on."""


class DivergenceError(LearnerError, ArithmeticError):
    """A loss, gradient norm, or updated state is not finite. Nothing from that step may be saved."""


class SampledLogprobsError(LearnerError, ArithmeticError):
    """The generators' log-probabilities for the first step do not match the policy."""


class CheckpointError(LearnerError, ValueError):
    """A checkpoint is missing, damaged, or does not fit the run."""


class RankGroupError(LearnerError, ConnectionError):
    """The learner's ranks cannot form a group, or a rank was lost."""


class DeadEndError(LearnerError, TimeoutError):
    """A wait reached a dead end. The message contains cause, remedy, and the last events."""
