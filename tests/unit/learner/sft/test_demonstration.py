import pytest

from slipstream.configs.base import ConfigError
from slipstream.learner.sft.dataset import Piece, chat_pieces, tokenize
from tests.tiny_model import make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}<eos>+{% endfor %}"
    "{% if add_generation_prompt %}assistant={% endif %}"
)
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else 'x' }} {% endfor %}"


def chat_tokenizer(template=TEMPLATE):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def conversation(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def trained(demonstration, tokenizer):
    return tokenizer.decode(demonstration.token_ids[demonstration.model_mask])


def test_every_assistant_turn_is_trained_and_the_rest_is_context():
    messages = conversation(
        ("system", "sum"), ("user", "1+2"), ("assistant", "3"), ("tool", "9"), ("assistant", "4"), ("user", "ok")
    )
    pieces = chat_pieces(messages, tokenizer=chat_tokenizer())
    assert pieces == [
        Piece("system=sum<eos>+user=1+2<eos>+assistant=", is_model=False),
        Piece("3<eos>+", is_model=True),
        Piece("tool=9<eos>+assistant=", is_model=False),
        Piece("4<eos>+", is_model=True),
    ]


def test_text_that_the_template_appends_to_the_end_token_is_not_trained():
    tokenizer = chat_tokenizer()
    demonstration = tokenize(
        chat_pieces(conversation(("user", "1+2"), ("assistant", "3")), tokenizer=tokenizer), tokenizer=tokenizer
    )
    assert trained(demonstration, tokenizer) == "3<eos>"
    assert demonstration.model_mask.tolist()[-3:] == [True, True, False]


def test_the_tokens_match_the_whole_conversation():
    tokenizer = chat_tokenizer()
    messages = conversation(("user", "1+2"), ("assistant", "3"), ("user", "4"), ("assistant", "5"))
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    demonstration = tokenize(chat_pieces(messages, tokenizer=tokenizer), tokenizer=tokenizer)
    assert demonstration.token_ids.tolist() == tokenizer.encode(whole, add_special_tokens=False)


def test_plain_text_is_followed_by_the_end_token():
    tokenizer = make_tokenizer()
    pieces = [Piece("12=", is_model=False), Piece("21", is_model=True)]
    demonstration = tokenize(pieces, tokenizer=tokenizer, end_token=tokenizer.eos_token_id)
    assert tokenizer.decode(demonstration.token_ids) == "12=21<eos>"
    assert demonstration.model_mask.tolist() == [False] * 3 + [True] * 3
    assert demonstration.trained.tolist() == [3, 4, 5]


def test_the_first_token_is_never_trained_because_nothing_predicts_it():
    demonstration = tokenize([Piece("21", is_model=True)], tokenizer=make_tokenizer())
    assert demonstration.trained.tolist() == [1]


@pytest.mark.parametrize("turns", [[("user", "1")], [("user", "1"), ("assistant", "")], []])
def test_a_conversation_with_an_empty_assistant_turn_or_none_has_no_pieces(turns):
    assert chat_pieces(conversation(*turns), tokenizer=chat_tokenizer()) == []


def test_a_turn_with_only_tool_calls_is_not_empty():
    template = "{% for m in messages %}{{ m.content or m.calls }}<eos>{% endfor %}"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None, "calls": "2"}]
    assert chat_pieces(messages, tokenizer=chat_tokenizer(template)) == [Piece("1<eos>", False), Piece("2<eos>", True)]


def test_a_template_that_rewrites_the_beginning_is_refused():
    messages = conversation(("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    with pytest.raises(ConfigError, match="provide the columns token_ids and model_mask"):
        chat_pieces(messages, tokenizer=chat_tokenizer(FORGETFUL))


def test_a_template_that_does_not_know_the_messages_is_named():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="must fit the chat template: roles must alternate"):
        chat_pieces(conversation(("user", "1"), ("assistant", "2")), tokenizer=chat_tokenizer(template))
