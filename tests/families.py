"""Families of models: tiny random ones of the real architectures, for tests without downloads."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_model import make_tokenizer

SMALL = {
    "vocab_size": len(make_tokenizer()),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 8}
BOTH = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = EXPERTS | {
    "kv_lora_rank": 512,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "qwen2": ("shared_rows", {}),
    "qwen2_moe": ("shared_rows", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3": ("shared_rows", {}),
    "qwen3_moe": ("shared_rows", EXPERTS | {"num_experts": 4}),
    "llama": ("shared_rows", {}),
    "gpt2": ("shared_rows", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "opt": ("shared_rows", {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "gpt_neox": ("shared_rows", {}),
    "olmo2": ("shared_rows", {}),
    "olmo3": ("shared_rows", BOTH),
    "phi": ("shared_rows", {}),
    "glm4": ("shared_rows", {"head_dim": 32}),
    "glm4_moe": ("shared_rows", LATENT | {"head_dim": 32}),
    "falcon": ("shared_rows", {"alibi": False}),
    "deepseek_v2": ("shared_rows", LATENT),
    # As on the hub; transformers writes neither.
    "deepseek_v3": ("shared_rows", LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    # A window in every layer, or in some.
    "mistral": ("shared_rows", WINDOW),
    "mixtral": ("shared_rows", WINDOW | {"num_local_experts": 4}),
    "phi3": ("shared_rows", WINDOW),
    "gemma2": ("shared_rows", BOTH),
    "gemma3_text": ("shared_rows", BOTH),
    "gpt_oss": ("shared_rows", BOTH | EXPERTS | {"num_local_experts": 4}),
    # Positions that are counted along the row; chunks of it; states that run along it.
    "bloom": ("one_per_row", {"n_layer": 2, "n_head": 2}),
    "falcon-alibi": ("one_per_row", {"alibi": True}),
    "llama4_text": (
        "one_per_row",
        {"attention_chunk_size": 8, "num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "mamba2": (
        "one_per_row",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16},
    ),
    "qwen3_next": (
        "one_per_row",
        LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5_text": ("one_per_row", LINEAR),
    # It sees what follows: no layout is exact, because none of its numbers is one of a causal language model.
    "bert": ("", {}),
}
"""Type of model -> layout that must be chosen, or none; settings that make it small."""


def make_family_module(name, *, seed=0):
    """A tiny random module of that family."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.split("-")[0], **(SMALL | FAMILIES[name][1]))
    return AutoModelForCausalLM.from_config(config)


def make_family(folder, name, *, seed=0):
    """Write such a model and its tokenizer in transformers format."""
    make_family_module(name, seed=seed).save_pretrained(folder / name)
    make_tokenizer().save_pretrained(folder / name)
    return folder / name
