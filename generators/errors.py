"""What can go wrong in a generator.

GeneratorFault
├── EngineFault          the engine does not start, or cannot do what it was asked
│   └── EngineDied       it is gone or stands still: a new process has a new one
├── PromptFault          a prompt cannot be tokenised or is too long
└── UnverifiedWeights    weights arrived that the probe or a checksum found wrong
"""


class GeneratorFault(Exception):
    """Root of the tree."""


class EngineFault(GeneratorFault, RuntimeError):
    """The engine does not start, or cannot do what it was asked; the message says what to look at."""


class EngineDied(EngineFault):
    """The engine is gone or stands still, and this generator with it; another start mends that."""


class PromptFault(GeneratorFault, ValueError):
    """A prompt cannot be answered; the message says which and why."""


class UnverifiedWeights(GeneratorFault, RuntimeError):
    """The engine's weights are not the learner's."""
