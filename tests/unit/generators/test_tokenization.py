import pytest

from slipstream.generators.errors import PromptError
from slipstream.generators.tokenization import PromptEncoder
from tests.builders import make_prompt
from tests.tiny_model import make_tokenizer


def make_prompting(max_prompt_tokens: int = 16) -> PromptEncoder:
    return PromptEncoder(make_tokenizer(), max_prompt_tokens=max_prompt_tokens)


def test_plain_text_is_encoded_without_special_tokens():
    prompting = make_prompting()
    token_ids = prompting.encode(make_prompt("48213="))
    assert len(token_ids) == 6
    assert prompting.decode(token_ids) == "48213="


def test_chat_messages_go_through_the_chat_template():
    prompting = make_prompting()
    token_ids = prompting.encode(make_prompt([{"role": "user", "content": "1+2"}]))
    assert prompting.decode(token_ids) == "1+2 ="


def test_decoding_drops_special_tokens():
    prompting = make_prompting()
    assert prompting.decode([*prompting.encode(make_prompt("31284")), 1]) == "31284"


@pytest.mark.parametrize("prompt", ["1234567", [{"role": "user", "content": "123456"}]])
def test_a_prompt_that_is_too_long_is_an_error_with_its_uid(prompt: str | list[dict[str, str]]):
    with pytest.raises(PromptError, match=r"prompt test/0 .* data.max_prompt_tokens \(6\) tokens, got [78]"):
        make_prompting(6).encode(make_prompt(prompt))


def test_text_unknown_to_the_tokenizer_is_an_error():
    with pytest.raises(PromptError, match="prompt test/0 must be encodable"):
        make_prompting().encode(make_prompt("Ä"))


def test_an_empty_prompt_is_an_error():
    with pytest.raises(PromptError, match="at least one token"):
        make_prompting().encode(make_prompt(""))


def test_chat_messages_without_a_template_are_an_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="must have a chat template"):
        PromptEncoder(tokenizer, max_prompt_tokens=8).encode(make_prompt([{"role": "user", "content": "1"}]))


def test_messages_that_do_not_fit_the_template_are_an_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="must fit the chat template: roles must alternate"):
        PromptEncoder(tokenizer, max_prompt_tokens=8).encode(make_prompt([{"role": "user", "content": "1"}]))
