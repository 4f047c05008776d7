"""PromptEncoder: encodes leased prompts to token ids and decodes responses to text."""

from typing import Any

from transformers import AutoTokenizer

from slipstream.broker.messages import Prompt
from slipstream.configs.data import ModelConfig
from slipstream.generators.errors import EngineError, PromptError
from slipstream.runtime.model_files import read_chat_template


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer from the model's folder, with the run's chat template. Raises EngineError, ConfigError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineError(f"model.path must hold a tokenizer, got {model.path!r}: {first_line}") from error
    if template := read_chat_template(model):
        tokenizer.chat_template = template
    return tokenizer


class PromptEncoder:
    """The only two uses of the tokenizer. Engine and learner exchange token ids: nothing is re-tokenised."""

    def __init__(self, tokenizer: Any, *, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode plain text without special tokens, chat messages with the chat template. Raises PromptError."""
        token_ids = self._encode_text(prompt) if isinstance(prompt.prompt, str) else self._encode_chat(prompt)
        if not token_ids:
            raise PromptError(f"prompt {prompt.uid} must hold at least one token, got none: drop the row")
        if len(token_ids) > self._max_prompt_tokens:
            raise PromptError(
                f"prompt {prompt.uid} must hold at most data.max_prompt_tokens ({self._max_prompt_tokens}) tokens, "
                f"got {len(token_ids)}: raise the limit or drop the row"
            )
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        """Decode a response for the reward function, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _encode_text(self, prompt: Prompt) -> list[int]:
        try:
            return self._tokenizer.encode(prompt.prompt, add_special_tokens=False)
        except Exception as error:
            raise PromptError(
                f"prompt {prompt.uid} must be encodable by the tokenizer, got {prompt.prompt[:60]!r}: {error}"
            ) from error

    def _encode_chat(self, prompt: Prompt) -> list[int]:
        if not self._tokenizer.chat_template:
            raise PromptError(
                f"prompt {prompt.uid} is a list of chat messages, so the tokenizer must have a chat template: "
                "put plain text into the prompt column, set model.chat_template, or use an instruction-tuned checkpoint"
            )
        try:
            text = self._tokenizer.apply_chat_template(prompt.prompt, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise PromptError(f"prompt {prompt.uid} must fit the chat template: {error}") from error
        # The template has already written the special tokens.
        return self._tokenizer.encode(text, add_special_tokens=False)
