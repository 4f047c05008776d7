"""PromptEncoder: converts prompts and observations to token ids, and responses to text."""

import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from transformers import AutoTokenizer

from slipstream.broker.messages import Row
from slipstream.configs.base import ConfigError
from slipstream.configs.data import ModelConfig, require_template_variables
from slipstream.generators.errors import EngineError, PromptError
from slipstream.runtime.images import PromptImage, VisionModel
from slipstream.runtime.model_files import Reasoning, check_template_variables, find_reasoning, read_chat_template


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer with the run's chat template. Raises EngineError, ConfigError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineError(f"model.path must hold a tokenizer, got {model.path!r}: {first_line}") from error
    if template := read_chat_template(model):
        tokenizer.chat_template = template
    check_template_variables(tokenizer, model)
    return tokenizer


Records = list[dict[str, Any]]
"""Chat messages, or JSON schemas of tools."""
Variables = Mapping[str, Any] | None
"""Variables of a chat template."""
_PROBE = "42"
_HEADER_TOKENS = 16
"""Enough for the mark that ends a turn's header."""
_MARK = "SLIPSTREAM.TURN.OF.THE.MODEL"
_TURN = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
_HIDDEN = "\ue000{}\ue001"
_HIDDEN_NUMBER = re.compile("\ue000([0-9]+)\ue001")


class PromptEncoder:
    """Encodes prompts and observations. Model output is never tokenized again."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        template_variables: Variables = None,
        vision: VisionModel | None = None,
    ) -> None:
        """`template_variables`: see `model.chat_template_kwargs`. `vision`: for prompts with images."""
        self.tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._variables = dict(template_variables or {})
        self._vision = vision

    def encode(self, prompt: Row, *, tools: Records | None = None) -> tuple[list[int], list[PromptImage]]:
        """Encode plain text without special tokens, or chat messages with the chat template. Raises PromptError.

        Also returns the prompt's images, with expanded placeholder tokens.
        """
        if isinstance(prompt.prompt, str):
            try:
                token_ids = self.tokenizer.encode(prompt.prompt, add_special_tokens=False)
            except Exception as error:
                raise PromptError(
                    f"prompt {prompt.uid} must be encodable by the tokenizer, got {prompt.prompt[:60]!r}: {error}"
                ) from error
        else:
            self._require_template(f"prompt {prompt.uid} is a list of chat messages")
            variables = self.row_variables(prompt)
            text = self._render(prompt.prompt, tools=tools, variables=variables, subject=f"prompt {prompt.uid}")
            token_ids = self.encode_text(text, special_tokens=True)
        images: list[PromptImage] = []
        if prompt.images:
            try:
                assert self._vision, "prompts with images require a vision model"
                token_ids, images = self._vision.expand(token_ids, prompt.images)
                for image in images:
                    # Damaged pixels in the engine would fail every request.
                    self._vision.patches(image.data)
            except ConfigError as error:
                raise PromptError(f"prompt {prompt.uid}: {error}") from error
        if not token_ids:
            raise PromptError(f"prompt {prompt.uid} must hold at least one token, got none: drop the row")
        if len(token_ids) > self._max_prompt_tokens:
            raise PromptError(
                f"prompt {prompt.uid} must hold at most data.max_prompt_tokens ({self._max_prompt_tokens}) tokens, "
                f"got {len(token_ids)}: raise the limit or drop the row"
            )
        return token_ids, images

    def row_variables(self, prompt: Row, *, asked: Variables = None) -> dict[str, Any]:
        """Row's template variables (`extra_info.chat_template_kwargs`), overridden by `asked`. Raises PromptError."""
        row = prompt.extra_info.get("chat_template_kwargs") or {}
        try:
            for given in (row, asked or {}):
                require_template_variables(given, setting="chat_template_kwargs")
        except ConfigError as error:
            raise PromptError(f"prompt {prompt.uid}: {error}") from None
        return {**row, **(asked or {})}

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def encode_text(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Adds no special tokens. `special_tokens`: encode their names in the text as those tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special_tokens)

    @cached_property
    def reasoning(self) -> Reasoning:
        return find_reasoning(self.tokenizer)

    def split_reasoning(self, token_ids: list[int], *, context: list[int], is_ended: bool) -> tuple[str | None, str]:
        """Split a turn after `context` into its reasoning (None without marks) and the rest, with special tokens.

        `is_ended`: leave out the last token.
        """
        header = self.tokenizer.decode(context[-_HEADER_TOKENS:], skip_special_tokens=False)
        text = self.tokenizer.decode(token_ids[: len(token_ids) - is_ended], skip_special_tokens=False)
        return self.reasoning.split(text, is_open=self.reasoning.is_opened_by(header))

    def without_special_tokens(self, text: str) -> str:
        for name in self._special_names:
            text = text.replace(name, "")
        return text

    def shortened(self, text: str, max_tokens: int) -> str:
        token_ids = self.encode_text(text)
        # The cut may split a character.
        return text if len(token_ids) <= max_tokens else self.decode(token_ids[:max_tokens]).rstrip("\ufffd")

    def encode_between_turns(
        self, messages: Records, *, last_token_id: int | None, variables: Variables = None
    ) -> list[int]:
        """Encode everything between two model turns: end of the first, `messages`, header of the next.

        Names of special tokens in messages are plain text, so that no tool result can end or start a turn.
        `last_token_id`: the model's last token. After an end token, the template's is left out, also if they differ, as
        for `<|eom_id|>` or `<|endoftext|>`. Raises PromptError.
        """
        self._require_template("an agent answers with chat messages")
        # A marker replaces the model's turn, which the text after it does not depend on.
        turns = [*_TURN, *self._hide_names(messages)]
        text = self._render(turns, variables=variables, subject="the messages of an agent")
        # The first marker, because a message may contain it too.
        _, mark, rest = text.partition(_MARK)
        if not mark:
            raise PromptError("the chat template must render the text of assistant messages, but it omits it")
        token_ids = self._encode_hidden(rest)
        return token_ids[self._num_ended(token_ids, last_token_id) :]

    def _num_ended(self, token_ids: list[int], last_token_id: int | None) -> int:
        """Count the tokens at the start of `token_ids` that end a turn which `last_token_id` has ended."""
        if token_ids and token_ids[0] == last_token_id:
            return 1
        # At a limit, a turn ends with a token of text.
        if last_token_id not in self._special_ids:
            return 0
        ending = os.path.commonprefix([token_ids, self._turn_end])  # noqa: RUF071, tokens rather than paths
        if last_token_id in ending:
            return len(ending) - ending[::-1].index(last_token_id)
        return next((count for count, token_id in enumerate(ending, start=1) if token_id in self._special_ids), 0)

    @cached_property
    def _turn_end(self) -> list[int]:
        """Tokens after the model's turn; empty if the next header ends it, as for GLM."""
        text = self._render(_TURN, variables={"add_generation_prompt": False}, subject="a turn")
        return self.encode_text(text.partition(_MARK)[2], special_tokens=True)

    def encode_messages(self, messages: Records, *, tools: Records | None, variables: Variables = None) -> list[int]:
        """Encode a conversation up to the header of the model's next turn, with names of special tokens as plain text.

        Raises PromptError.
        """
        self._require_template("an agent sends chat messages")
        hidden, subject = self._hide_names(messages), "the messages of an agent"
        return self._encode_hidden(self._render(hidden, tools=tools, variables=variables, subject=subject))

    def _encode_hidden(self, text: str) -> list[int]:
        token_ids = []
        for number, part in enumerate(_HIDDEN_NUMBER.split(text)):
            if number % 2 == 0:
                token_ids += self.encode_text(part, special_tokens=True)
            elif int(part) < len(self._special_names):
                token_ids += self.encode_text(self._special_names[int(part)])
        return token_ids

    @cached_property
    def _special_names(self) -> list[str]:
        names = {self.tokenizer.added_tokens_decoder[number].content for number in self._special_ids}
        return sorted(names, key=len, reverse=True)

    @cached_property
    def _special_ids(self) -> set[int | None]:
        return {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def _hide_names(self, value: Any) -> Any:
        if isinstance(value, str):
            for number, name in enumerate(self._special_names):
                value = value.replace(name, _HIDDEN.format(number))
            return value
        if isinstance(value, list):
            return [self._hide_names(item) for item in value]
        return {key: self._hide_names(item) for key, item in value.items()} if isinstance(value, dict) else value

    def result_role(self, *, setting: str) -> str:
        """Role for tool results: `tool`, or `user` if the template does not support it.

        Raises ConfigError, also for a template that needs `tool_calls` or the ids of calls, which turns here lack.
        """
        shown = self._render_result("call00000")
        for role in ("tool", "user"):
            if shown != self._render_result("call00001"):
                reason = (
                    "the template shows the id of a call with its result (as those of Kimi K2 and Command A do), while "
                    "calls here have no ids"
                )
                break
            if role == "user" and _PROBE in shown:
                reason = (
                    "the template shows results only after a message with `tool_calls` (as those of gpt-oss and "
                    "Gemma 4 do), while the model's turns here stay text"
                )
                break
            try:
                result = self.encode_between_turns([{"role": role, "content": _PROBE}], last_token_id=None)
            except PromptError as error:
                reason = str(error)
            else:
                if _PROBE in self.decode(result):
                    return role
                reason = f"the template omits messages with the role {role}"
        raise ConfigError(
            f"{setting}.tool_call_format must fit the tokenizer's chat template, or be `react`, which needs none, but "
            f"{reason}."
        )

    def _render_result(self, id_: str) -> str:
        """Render two calls and the result of one; empty if the template refuses them."""
        function = {"name": "look", "arguments": {}}
        calls = [{"id": f"call0000{number}", "type": "function", "function": function} for number in range(2)]
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        result = {"role": "tool", "name": "look", "tool_call_id": id_, "content": _PROBE}
        try:
            return self._render([_TURN[0], called, result], subject="a tool result")
        except PromptError:
            return ""

    def _require_template(self, reason: str) -> None:
        if not self.tokenizer.chat_template:
            raise PromptError(
                f"{reason}, so the tokenizer must have a chat template: "
                "use plain text in the prompt column, set model.chat_template, or use an instruction-tuned checkpoint"
            )

    def _render(
        self, messages: Records, *, subject: str, tools: Records | None = None, variables: Variables = None
    ) -> str:
        own = {"add_generation_prompt": True, **self._variables, **(variables or {}), "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **own)
        except Exception as error:
            raise PromptError(f"{subject} must fit the chat template: {error}") from error
