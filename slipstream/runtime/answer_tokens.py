"""Token ids of a prompt with an answer, as a reward model reads them: the same in training and in use."""

from typing import Any

from slipstream.configs.base import ConfigError

Text = str | list[dict[str, Any]]
"""Plain text, or chat messages with `role` and `content`."""


def answer_token_ids(tokenizer: Any, prompt: Text, answer: Text) -> list[int]:
    """Return the ids of both, with the end of the answer.

    Texts are tokenised one by one and followed by the end token; with messages on either side both go through the chat
    template. Raises ConfigError.
    """
    if isinstance(prompt, str) and isinstance(answer, str):
        # One by one, as generators do: no token may span both.
        parts = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
        return [*parts[0], *parts[1], tokenizer.eos_token_id]
    messages = [*_messages(prompt, role="user"), *_messages(answer, role="assistant")]
    if not tokenizer.chat_template:
        raise ConfigError("messages need a chat template, but the tokenizer has none: give text on both sides.")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    # A template is a program that came with the model: it may raise anything.
    except Exception as error:
        raise ConfigError(f"the messages must fit the chat template: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _messages(side: Text, *, role: str) -> list[dict[str, Any]]:
    if isinstance(side, str):
        return [{"role": role, "content": side}] if side else []
    # Parquet fills absent fields with null, but templates test whether a field is defined.
    return [{key: value for key, value in message.items() if value is not None} for message in side]
