"""The random model: any tool loads it, and the same seed gives the same weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.configs.base import ConfigError
from slipstream.scripts.init_random_model import main, make_model, make_tokenizer


def test_model_and_tokenizer_load_with_transformers_as_they_were_made(tmp_path: Path) -> None:
    main(["--layers=1", "--width=64", f"--out={tmp_path}/model", "--seed=3"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    made = make_model(layers=1, width=64, seed=3).state_dict()
    assert model.config.model_type == "qwen2"
    assert model.state_dict().keys() == made.keys()
    assert all(torch.equal(value, made[name]) for name, value in model.state_dict().items())
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    tokenizer, loaded = make_tokenizer(), AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.get_vocab() == loaded.get_vocab()
    assert loaded("37+48=")["input_ids"] == tokenizer("37+48=", add_special_tokens=False)["input_ids"]
    assert loaded.decode(loaded("37+48=")["input_ids"]) == "37+48="
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert len(tokenizer("48213=")["input_ids"]) == 6, "one character is one token"


def test_the_default_has_about_a_million_parameters_and_every_head_is_whole() -> None:
    assert 700_000 < make_model(layers=4, width=128, seed=0).num_parameters() < 1_000_000
    with pytest.raises(ConfigError, match="--width must be a multiple of 32, the width of a head, got 100"):
        make_model(layers=1, width=100, seed=0)


def test_the_seed_determines_the_result() -> None:
    first, again, other = (make_model(layers=1, width=64, seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
