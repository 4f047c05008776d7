"""Errors of a generator.

GeneratorError
├── EngineError               the engine does not start, or fails a request
│   └── EngineDiedError       the engine is gone or stalled: the process must be restarted
│       └── EngineStartError  it ended before its first answer: a restart helps unless the same comes back
├── PromptError               a prompt cannot be tokenised or is too long
└── UnverifiedWeightsError    loaded weights that the probe or a check found wrong
"""


class GeneratorError(Exception):
    """Base of this package's errors."""


class EngineError(GeneratorError, RuntimeError):
    """The engine does not start, or fails a request."""


class EngineDiedError(EngineError):
    """The engine is gone or stalled; restarting the generator process recovers it."""


class EngineStartError(EngineDiedError):
    """The engine ended before its first answer. A restart is worth one try: the same error again will not go away."""


class PromptError(GeneratorError, ValueError):
    """A prompt cannot be answered. The lease is returned and the generator continues."""


class UnverifiedWeightsError(GeneratorError, RuntimeError):
    """The engine's weights differ from the learner's."""


class ToolError(Exception):
    """A call that cannot be answered; the model reads the message."""
