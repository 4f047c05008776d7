"""Which model is trained."""

from typing import Literal

from configs.base import Config


class ModelConfig(Config):
    """A transformers checkpoint: a folder or a hub name."""

    path: str
    """Initial weights and tokenizer, in transformers format."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the engine computes in and what weights travel as. The learner keeps its master weights in float32."""
    max_length: int = 64
    """Longest prompt + response, tokens."""
    trust_remote_code: bool = False
    """Whether code that comes with the checkpoint may run."""
