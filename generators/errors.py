"""What can go wrong in a generator.

GeneratorError
├── EngineError          the engine does not start, or cannot do what it was asked
│   └── EngineDiedError       it is gone or stands still: a new process has a new one
├── PromptError          a prompt cannot be tokenised or is too long
└── UnverifiedWeightsError    weights arrived that the probe or a checksum found wrong
"""


class GeneratorError(Exception):
    """Root of the tree."""


class EngineError(GeneratorError, RuntimeError):
    """The engine does not start, or cannot do what it was asked; the message says what to look at."""


class EngineDiedError(EngineError):
    """The engine is gone or stands still, and this generator with it; another start mends that."""


class PromptError(GeneratorError, ValueError):
    """A prompt cannot be answered; the message says which and why."""


class UnverifiedWeightsError(GeneratorError, RuntimeError):
    """The engine's weights are not the learner's."""
