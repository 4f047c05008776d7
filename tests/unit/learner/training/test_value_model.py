import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.configs.data import ModelConfig
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.errors import ModelError
from slipstream.learner.training.critic import ValueModel, load_value_model, save_value_model
from tests.tiny_model import make_tiny_module
from tests.tolerance import gradient_terms, is_rounding
from tests.unit.learner.builders import CPU, make_groups, make_model, make_response, make_samples

LAYOUTS = [Layout("shared_rows", 8192), Layout("shared_rows", 64), Layout("shared_rows", 48, row_tokens=32)]


def load(path):
    return load_value_model(ModelConfig(path=str(path)), device=CPU)


def make_value_model(**settings):
    model = ValueModel(make_tiny_module(**settings).model.train())
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.head.bias)
    return model


def values_packed(model, trajectories, layout):
    """float32[N]: in the order of the trajectories."""
    microbatches = collate(make_samples(trajectories), layout=layout)
    values = torch.empty(sum(len(microbatch.indices) for microbatch in microbatches))
    for microbatch in microbatches:
        values[microbatch.indices] = model(microbatch)["values"]
    return values


def values_alone(model, trajectory):
    """Values of a trajectory alone, each from the tokens before its model-written token."""
    token_ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    indices = np.flatnonzero(trajectory.model_mask)
    hidden = [model.trunk(input_ids=token_ids[None, :index]).last_hidden_state[0, -1] for index in indices]
    return model.head(torch.stack(hidden))[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS, ids=["whole", "split", "small"])
def test_values_of_packed_sequences_are_those_of_each_alone(layout):
    model, trajectories = make_value_model(), [m for group in make_groups(num_groups=3) for m in group]
    expected = torch.cat([values_alone(model, trajectory) for trajectory in trajectories])
    found = values_packed(model, trajectories, layout)
    assert is_rounding([found], [expected], terms=gradient_terms(model, num_tokens=0))
    assert float(expected.std()) > 0.1


@torch.no_grad()
def test_the_value_of_a_state_does_not_see_the_token_that_follows():
    model = make_value_model()
    one, other = make_response(response=(5, 6, 7, 1)), make_response(response=(5, 6, 9, 8))
    first, second = (values_packed(model, [each], LAYOUTS[0]) for each in (one, other))
    assert first[:3].equal(second[:3])
    assert first[3] != second[3]


@torch.no_grad()
def test_a_tools_tokens_are_read_and_have_no_value():
    model = make_value_model()
    mask = np.array([False] * 4 + [True, True, False, False, True, True])
    tool = make_response(response=(5, 6, 20, 21, 7, 1), model_mask=mask)
    values = values_packed(model, [tool], LAYOUTS[0])
    assert torch.allclose(values, values_alone(model, tool), atol=1e-5)
    assert len(values) == 4
    other = make_response(response=(5, 6, 22, 21, 7, 1), model_mask=mask)
    assert values[2] != values_packed(model, [other], LAYOUTS[0])[2]


def test_it_begins_with_the_policys_trunk_and_zeros(tmp_path):
    model = load(make_model(tmp_path))
    trunk = make_tiny_module().model
    assert all(a.equal(b) for a, b in zip(model.trunk.parameters(), trunk.parameters(), strict=True))
    values = values_packed(model, make_groups()[0], LAYOUTS[0])
    assert values.dtype == torch.float32
    assert not values.any()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_what_is_saved_is_what_is_loaded(tmp_path, is_tied):
    model = make_value_model(is_tied=is_tied)
    save_value_model(model, tmp_path / "saved", weights={n: p.detach() for n, p in model.weights()})
    again = dict(load(tmp_path / "saved").weights())
    assert again.keys() == dict(model.weights()).keys()
    assert all(parameter.equal(again[name]) for name, parameter in model.weights())


def test_a_value_model_without_its_head_does_not_begin_at_zero(tmp_path):
    model = make_value_model()
    save_value_model(model, tmp_path / "saved", weights={n: p.detach() for n, p in model.weights()})
    (tmp_path / "saved" / "value_head.safetensors").unlink()
    with pytest.raises(ModelError, match=r"algorithm\.critic\.path .* got a trunk without a head in .*saved.*: copy"):
        load(tmp_path / "saved")


def test_a_model_in_bfloat16_still_returns_values_in_float32(tmp_path):
    rough = load_value_model(ModelConfig(path=str(make_model(tmp_path)), dtype="bfloat16"), device=CPU)
    exact = load(make_model(tmp_path))
    for model in (rough, exact):
        torch.nn.init.constant_(model.head.weight, 0.1)
    found, expected = (values_packed(model, make_groups()[0], LAYOUTS[0]) for model in (rough, exact))
    assert found.dtype == torch.float32
    assert 0 < float((found - expected).abs().max()) < 0.2


def test_a_checkpoint_without_a_trunk_is_one_sentence(tmp_path):
    path = make_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    save_file({"lm_head.weight": weights["lm_head.weight"]}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"algorithm\.critic\.path .*a trunk and an lm_head.*lacks 26") as caught:
        load(path)
    assert "\n" not in str(caught.value)
