"""Chat templates of six forms, in the manner of six families, and a byte-level tokenizer that knows their tokens."""

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
    # Phi 3
    "phi": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|end|>",
    ),
    # Qwen 3: writes less of turns before the last than the model wrote
    "thinking": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
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
    return fast
