"""Errors of a generator.

GeneratorError
├── EngineError               the engine does not start, or fails a request
│   └── EngineDiedError       the engine exited or stalled; restart the process
│       └── EngineStartError  the engine exited before its first answer; restart once
├── PromptError               a prompt cannot be answered
└── UnverifiedWeightsError    loaded weights failed the probe or a check
"""


class GeneratorError(Exception):
    """Base of this package's errors."""


class EngineError(GeneratorError, RuntimeError):
    """The engine does not start, or fails a request."""


class EngineDiedError(EngineError):
    """The engine exited or stalled. Restarting the generator process recovers it."""


class EngineStartError(EngineDiedError):
    """The engine exited before its first answer. Restart once; if the error repeats, it is permanent."""


class PromptError(GeneratorError, ValueError):
    """A prompt cannot be answered. The lease is returned and the generator continues."""


class UnverifiedWeightsError(GeneratorError, RuntimeError):
    """The engine's weights differ from the learner's."""


class ToolError(Exception):
    """A failed tool call. The model reads the message."""
