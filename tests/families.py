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
CONVOLVED = {"layer_types": ["conv", "full_attention"]}
LONG = {"original_max_position_embeddings": 64}
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
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
    "qwen3_next": ("one_per_row", LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3_5_text": ("one_per_row", LINEAR),
    "qwen3_5_moe_text": ("one_per_row", LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "falcon_h1": (
        "one_per_row",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16},
    ),
    "jamba": (
        "one_per_row",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False, "mamba_d_state": 8},
    ),
    "lfm2": ("one_per_row", CONVOLVED | {"block_multiple_of": 32}),
    "lfm2_moe": ("one_per_row", CONVOLVED | EXPERTS | {"num_experts": 4, "num_dense_layers": 1}),
    "inkling_text": (
        "one_per_row",
        EXPERTS
        | {"head_dim": 32, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 32}
        | {"n_routed_experts": 4, "n_shared_experts": 1, "local_layer_ids": [0], "d_rel": 4, "rel_extent": 64}
        | {"eos_token_id": 1, "bos_token_id": 1, "sliding_window_size": 8},
    ),
    "qwen4_exp_text": (
        "one_per_row",
        LINEAR
        | EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 32, "hc_lowrank": 8}
        | {"layer_types": ["linear_attention", "linear_attention"], "ngram_vocab_size_base": 64},
    ),
    "recurrent_gemma": (
        "one_per_row",
        {"lru_width": 64, "attention_window_size": 16, "num_hidden_layers": 3, "head_dim": 32},
    ),
    "xlstm": ("one_per_row", {"num_heads": 2, "num_blocks": 2, "embedding_dim": 64, "chunk_size": 16}),
    # Keys are pooled over 4 and 128 tokens, counted along the row.
    "deepseek_v4": (
        "one_per_row",
        EXPERTS
        | {"head_dim": 64, "q_lora_rank": 16, "n_routed_experts": 4, "o_groups": 2, "o_lora_rank": 16}
        | {"num_key_value_heads": 1, "hc_mult": 2, "sliding_window": 32, "index_n_heads": 2, "index_head_dim": 64}
        | {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "bos_token_id": 0},
    ),
    # Its mask has as many columns as it has positions.
    "gpt_neo": (
        "one_row",
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]} | {"window_size": 16},
    ),
    # The threshold of its router is called jitter, and is used without noise, too.
    "phimoe": ("shared_rows", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}),
    # Rotary embeddings that depend on the longest sequence of a pass.
    "phi3-longrope": ("one_at_a_time", LONG | {"rope_parameters": LONG | ROPE}),
    # They see what follows: no layout is exact, because none of their numbers is one of a causal language model.
    "bert": ("", {}),
    "xlnet": ("", {"d_model": 64, "n_layer": 2, "n_head": 2, "d_inner": 64, "attn_type": "bi"}),
}
"""Type of model -> layout that must be chosen, or none; settings that make it small."""
VARIANTS = {"falcon-alibi": "falcon", "phi3-longrope": "phi3"}
"""Further settings of a type of model."""


def make_family_module(name, *, seed=0, spread=0.3):
    """A tiny random module of that family; `spread`: standard deviation of its weights, 0.02 in transformers."""
    torch.manual_seed(seed)
    settings = SMALL | {"initializer_range": spread} | FAMILIES[name][1]
    if "init_std" in settings:
        settings["init_std"] = spread
    if name == "xlnet":
        del settings["max_position_embeddings"]
    config = AutoConfig.for_model(VARIANTS.get(name, name), **settings)
    return AutoModelForCausalLM.from_config(config)


def make_family(folder, name, *, seed=0, spread=0.3):
    """Write such a model and its tokenizer in transformers format."""
    make_family_module(name, seed=seed, spread=spread).save_pretrained(folder / name)
    make_tokenizer().save_pretrained(folder / name)
    return folder / name
