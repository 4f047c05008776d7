"""A tiny random Qwen2 model and its character tokenizer, for tests without downloads."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789=+ abcdefghijklmnopqrstuvwxyz"
PAD, EOS = "<pad>", "<eos>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content + ' ' }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character; `<pad>` is 0 and `<eos>` is 1."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_module(*, seed: int = 0, is_tied: bool = False, spread: float = 0.3) -> Qwen2ForCausalLM:
    """Two layers, width 64; weights are drawn wide enough that probabilities differ visibly between tokens."""
    config = Qwen2Config(
        vocab_size=len(make_tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=is_tied,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def make_tiny_model(folder: Path, *, seed: int = 0, is_tied: bool = False) -> Path:
    """Write such a model and its tokenizer in transformers format."""
    make_tiny_module(seed=seed, is_tied=is_tied).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
