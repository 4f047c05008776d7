"""Errors of a generator.

GeneratorError
├── EngineError
│   └── EngineDiedError
│       └── EngineStartError
├── PromptError
└── UnverifiedWeightsError

ToolError reaches only the model.
"""


class GeneratorError(Exception):
    """Base of this package's errors."""


class EngineError(GeneratorError, RuntimeError):
    """The engine does not start, or fails a request."""


class EngineDiedError(EngineError):
    """The engine exited or stalled. Restart the generator process."""


class EngineStartError(EngineDiedError):
    """The engine exited before its first answer. Restart once; if the error repeats, it is permanent."""


class PromptError(GeneratorError, ValueError):
    """A prompt cannot be answered. The lease is returned and the generator continues."""


class UnverifiedWeightsError(GeneratorError, RuntimeError):
    """Loaded weights failed the probe or a check."""


class ToolError(Exception):
    """A failed tool call. Its message is the call's result."""
