"""end_token_ids: which tokens end a response."""

from typing import Any


def end_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """The tokenizer's end token and those of the checkpoint's generation config; both engines stop at the same ones."""
    listed = getattr(generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({token_id for token_id in [tokenizer.eos_token_id, *listed] if token_id is not None})
