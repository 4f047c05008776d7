"""Chat templates in the manner of several families, and a byte-level tokenizer that knows their tokens."""

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    # Qwen, Hermes
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    # Llama 3: trims what it renders
    "llama": (
        "<|begin|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}",
        "<|eot|>",
    ),
    # Gemma: the assistant has another name, and tools have no role
    "gemma": (
        "<bos>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|turn|>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|/turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>model\n{% endif %}",
        "<|/turn|>",
    ),
    # Mistral: no header for the assistant
    "mistral": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}{{ m.content }}</s>{% endif %}"
        "{% endfor %}",
        "</s>",
    ),
    # Qwen 3: writes less of turns before the last than the model wrote
    "thinking": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    # gpt-oss: a result needs the call before it
    "gpt-oss": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no previous assistant message with a tool call') }}{% endif %}"
        "<|header|>{{ messages[loop.index0 - 1].tool_calls[0].function.name }}<|/header|>"
        "{{ m.content | tojson }}<|eot|>"
        "{% else %}<|header|>{{ m.role }}<|/header|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|header|>assistant<|/header|>{% endif %}",
        "<|eot|>",
    ),
    # Gemma 4: results are part of the turn that calls, and are left out without it
    "gemma4": (
        "<bos>{% for m in messages %}{% if m.role != 'tool' %}<|turn|>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% if m.tool_calls %}{% for r in messages if r.role == 'tool' %}[RESULT]{{ r.content }}[/RESULT]{% endfor %}"
        "{% endif %}{{ m.content | trim }}<|/turn|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>model\n{% endif %}",
        "<|/turn|>",
    ),
    # Qwen 3: variables of the template, reasoning as a field, and reasoning kept only after the last user message
    "qwen3": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% set thought = m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1].strip()"
        " if '</think>' in m.content or m.reasoning_content else '' %}"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "<|im_end|>",
    ),
}
"""Family -> template, end token of the model's turn."""
_SPECIAL = ["<|im_start|>", "<|begin|>", "<|header|>", "<|/header|>", "<bos>", "<|turn|>", "<s>", "[INST]", "[/INST]"]
_SPECIAL += ["[RESULT]", "[/RESULT]", "<|user|>", "<|tool|>", "<|system|>", "<|assistant|>"]


def make_chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Bytes and a few merges, so that some tokens have several characters, spaces and line ends among them."""
    template, end = TEMPLATES[family]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[end, *_SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the answer is\n\nwhat the tool said: 12 + 30 = 42\n"] * 8, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    fast.chat_template = template
    if family == "qwen3":
        fast.add_tokens(["<think>", "</think>"])
    return fast
