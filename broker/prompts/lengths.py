"""Lengths of prompts in tokens, as generators encode them.

With the tokenizer's own file, and without transformers' classes, which would bring torch into the broker.
"""

from collections.abc import Callable
from typing import Any

import structlog
from tokenizers import Tokenizer

from slipstream.broker.prompts.rows import PromptText
from slipstream.configs.data import ModelConfig
from slipstream.runtime.model_files import find_file, read_chat_template, read_json

_BATCH = 1024

log = structlog.get_logger(__name__)


def is_short(prompt: PromptText, most: int) -> bool:
    """Whether the prompt cannot have more than `most` tokens, as can be told without a tokenizer."""
    # No token is shorter than a character, and a tokenizer may put one blank in front.
    return isinstance(prompt, str) and prompt.isascii() and len(prompt) < most


def count_tokens(prompts: list[PromptText], model: ModelConfig) -> list[int]:
    """Count the tokens of each prompt as generators encode it; 0 where that cannot be known here."""
    if not prompts:
        return []
    if (file := find_file(model.path, "tokenizer.json")) is None:
        log.warning("prompt_lengths_unknown", reason=f"{model.path} has no tokenizer.json on this machine")
        return [0] * len(prompts)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    render = chat_renderer(model) if any(not isinstance(prompt, str) for prompt in prompts) else str
    texts = [prompt if isinstance(prompt, str) else render(prompt) for prompt in prompts]
    # In batches, because an encoding takes far more memory than its text.
    batches = (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))
    return [len(found) for batch in batches for found in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]


def chat_renderer(model: ModelConfig) -> Callable[[Any], str]:
    """Function from chat messages to text by the template; to no text where generators will report an error."""
    # Imported for this alone: it takes a second, and most of the time no prompt needs it.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    template, settings = find_template(model), read_json(model.path, "tokenizer_config.json")
    found = {key: value for key, value in settings.items() if key.endswith("_token")}
    tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}

    def render(messages: Any) -> str:
        try:
            texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **tokens)
        except (TemplateError, TypeError, ValueError):
            return ""
        return str(texts[0])

    return render if template else lambda _: ""


def find_template(model: ModelConfig) -> str:
    """Return the chat template of the settings, else of the checkpoint; empty without one. Raises ConfigError."""
    if given := read_chat_template(model):
        return given
    if file := find_file(model.path, "chat_template.jinja"):
        return file.read_text("utf-8")
    # In older checkpoints a text, or a list of texts by name.
    template = read_json(model.path, "tokenizer_config.json").get("chat_template") or ""
    if isinstance(template, list):
        template = next((each.get("template") for each in template if each.get("name") == "default"), "")
    return str(template)
