"""Contract of every TrainEngine: plain torch, and DeepSpeed at each ZeRO stage, on one CPU rank."""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from slipstream.configs.algorithm import (
    AlgorithmConfig,
    CriticConfig,
    CriticOptimizerConfig,
    KlConfig,
    ProcessRewardConfig,
    ProcessRewardOptimizerConfig,
)
from slipstream.configs.algorithm_terms import GaeConfig, PrimeConfig
from slipstream.configs.data import LoraConfig, ModelConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig, TorchEngineConfig
from slipstream.learner import build
from slipstream.learner.algorithms import logprobs
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.engines import deepspeed_engine
from slipstream.learner.engines.engine import check_finite
from slipstream.learner.engines.optimizer import STATE_FILE
from slipstream.learner.errors import DivergenceError
from slipstream.learner.publishing.staging import canary_logprobs
from slipstream.learner.training import second_model
from slipstream.learner.training.model import is_sharded, load_policy
from slipstream.learner.training.second_model import load_value_model
from slipstream.learner.training.step_metrics import GradientSimilarity
from tests.tolerance import largest_difference
from tests.unit.learner.builders import (
    VOCABULARY,
    make_alone,
    make_groups,
    make_model,
    make_run,
    make_samples,
    make_trainer,
    weights,
    zero,
)

NAMED = r"the weights must be finite after step 4, got NaN or infinity in model\.norm\.weight: start again\."
QUICK = CriticOptimizerConfig(learning_rate=1e-3)
PROCESS_REWARD = ProcessRewardConfig(optimizer=ProcessRewardOptimizerConfig(learning_rate=1e-3, epsilon=1e-4))
ENGINES = {"torch": TorchEngineConfig(), **{f"zero-{stage}": zero(stage) for stage in range(4)}}
HALF = {"dtype": "bfloat16", "max_length": 64}
SETTINGS = {
    "whole": {},
    "split": {
        "learner": {"tokens_per_microbatch": 64, "optimizer": OptimizerConfig(learning_rate=1e-4, weight_decay=10.0)}
    },
    "reference": {"algorithm": AlgorithmConfig(kl=KlConfig(coef=0.1, estimator="full", refresh_every_steps=2))},
    "critic": {"algorithm": AlgorithmConfig(advantage=GaeConfig(), critic=CriticConfig(optimizer=QUICK))},
    "process reward": {"algorithm": AlgorithmConfig(advantage=PrimeConfig(), process_reward=PROCESS_REWARD)},
}
MUON = {"learner": {"optimizer": OptimizerConfig(name="muon", learning_rate=1e-4, weight_decay=10.0)}}
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())


def make_engine(folder, engine, *, is_tied=False, model=None, **optimizer):
    """`model`: fields of ModelConfig besides the path."""
    settings, path = {"engine": engine, "optimizer": OptimizerConfig(**optimizer)}, make_model(folder, is_tied=is_tied)
    chosen = {"model": ModelConfig(path=str(path), **model)} if model else {}
    return make_trainer(make_run(path, learner=settings, **chosen)).engine


def make_microbatches(seed=0):
    samples = make_samples([m for group in make_groups(num_groups=3, seed=seed) for m in group])
    return collate(samples, layout=Layout("shared_rows", microbatch_tokens=64))


def accumulate(engine, microbatches, *, factor=1.0):
    losses = []
    for microbatch in microbatches:
        logprobs = engine.forward(microbatch)["logprobs"]
        loss = -factor * logprobs.sum() / 100
        engine.backward(loss)
        losses.append(loss.item())
    return losses


def copied(engine):
    return {name: tensor.clone() for name, tensor in engine.gather_parameters()}


@pytest.mark.parametrize(("name", "settings"), [*itertools.product(ENGINES, SETTINGS), ("zero-0", "muon")])
def test_three_steps_give_the_losses_and_weights_of_plain_torch(tmp_path, name, settings):
    engine, settings = ENGINES[name], (SETTINGS | {"muon": MUON})[settings]

    def train(config):
        learner = {"engine": config} | settings.get("learner", {})
        trainer = make_trainer(make_run(make_model(tmp_path), **(settings | {"learner": learner})))
        metrics = [trainer.step(make_groups(seed=i), learner_version=0, step=i + 1) for i in range(3)]
        return metrics, weights(trainer)

    (expected, reference), (metrics, found) = train(TorchEngineConfig()), train(engine)
    for one, other in zip(expected, metrics, strict=True):
        assert other == pytest.approx(one, abs=1e-5, rel=1e-4)
    assert largest_difference(reference, found) < 1e-5


@every_engine
@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_of_a_few_tokens_at_a_time_change_no_step(tmp_path, engine, is_tied, monkeypatch):
    steps = []
    for elements in (logprobs.CHUNK_ELEMENTS["cpu"], 7 * VOCABULARY):
        monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", elements)
        # A large epsilon makes the update a smooth function of the gradient.
        used = make_engine(tmp_path, engine, is_tied=is_tied, epsilon=1.0)
        assert used.model.head is not None
        losses = accumulate(used, make_microbatches())
        steps.append((losses, used.step(learning_rate=1.0), copied(used)))
    (losses, norm, whole), (chunked_losses, chunked_norm, chunked) = steps
    assert chunked_losses == pytest.approx(losses, rel=1e-6)
    assert chunked_norm == pytest.approx(norm, rel=1e-5)
    assert largest_difference(whole, chunked) < 1e-5


def test_zero_3_shards_models_while_they_are_loaded(tmp_path, monkeypatch):
    loaded, shapes = [], []

    def load(real, *args, **options):
        loaded.append(real(*args, **options))
        return loaded[-1]

    def start(model, **options):
        shapes.append({tuple(parameter.shape) for parameter in getattr(model, "trunk", model).parameters()})
        return original(model, **options)

    original = build.DeepSpeedEngine
    monkeypatch.setattr(build, "load_policy", partial(load, load_policy))
    monkeypatch.setattr(second_model, "load_value_model", partial(load, load_value_model))
    monkeypatch.setattr(build, "DeepSpeedEngine", start)
    algorithm = AlgorithmConfig(kl=KlConfig(coef=0.1), advantage=GaeConfig())
    make_trainer(make_run(make_model(tmp_path), algorithm=algorithm, learner={"engine": zero(3)}))
    assert shapes == [{(0,)}, {(0,)}]
    critics = [model for model in loaded if hasattr(model, "trunk")]
    assert all(tuple(parameter.shape) == (0,) for parameter in critics[0].parameters())
    policies = [model for model in loaded if not hasattr(model, "trunk")]
    assert [is_sharded(policy) and policy.head is not None for policy in policies] == [True, True]


def test_parameters_and_optimizer_in_host_memory_change_nothing(tmp_path):
    found = []
    for is_offloaded in (False, True):
        engine = DeepSpeedEngineConfig(zero_stage=3, offload_parameters=is_offloaded, offload_optimizer=is_offloaded)
        trainer = make_trainer(make_run(make_model(tmp_path), learner={"engine": engine}))
        for i in range(2):
            trainer.step(make_groups(seed=i), learner_version=0, step=i + 1)
        found.append(weights(trainer))
    assert largest_difference(*found) < 1e-6


@pytest.mark.parametrize("stage", [0, 3])
def test_inputs_of_layers_in_host_memory_change_nothing(tmp_path, stage, monkeypatch):
    kept = []

    def save_on_cpu(**options):
        def keep(tensor):
            kept.append(tensor.shape)
            return tensor.clone()

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    monkeypatch.setattr(deepspeed_engine, "save_on_cpu", save_on_cpu)
    checkpointing = {"gradient_checkpointing": True}
    losses, moved = [], []
    for settings in ({}, checkpointing, checkpointing | {"offload_activations": True}):
        assert not kept
        engine = make_engine(tmp_path, DeepSpeedEngineConfig(zero_stage=stage, **settings), learning_rate=1e-2)
        microbatches = make_microbatches()
        losses.append(accumulate(engine, microbatches))
        engine.step(learning_rate=1e-2)
        moved.append(torch.cat([tensor.flatten() for _, tensor in engine.gather_parameters()]))
    assert torch.equal(moved[0], moved[1])
    assert torch.equal(moved[1], moved[2])
    # Only the inputs of both layers are kept, no weights.
    width = engine.model.backbone.config.get_text_config().hidden_size
    states = [shape for shape in kept if shape[-1:] == (width,)]
    assert states == [(*m.token_ids.shape, width) for m in microbatches for _ in range(2)]


@every_engine
def test_gradients_accumulate_until_the_step(tmp_path, engine):
    one, split = make_engine(tmp_path, engine), make_engine(tmp_path, engine)
    microbatches = make_microbatches()
    assert len(microbatches) > 1
    accumulate(one, microbatches)
    for microbatch in microbatches:
        accumulate(split, [microbatch], factor=0.25)
        accumulate(split, [microbatch], factor=0.75)
    norms = [e.step(learning_rate=1e-4) for e in (one, split)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert largest_difference(copied(one), copied(split)) < 1e-5


@every_engine
def test_gradients_are_scaled_down_above_the_bound_and_the_returned_norm_is_before_that(tmp_path, engine):
    moves, norms = [], []
    for bound in (1e9, None, 1e-3):
        # A large epsilon makes the update a smooth function of the gradient.
        used = make_engine(tmp_path, engine, max_grad_norm=bound, epsilon=1.0)
        before = copied(used)
        accumulate(used, make_microbatches())
        norms.append(used.step(learning_rate=1.0))
        moves.append(largest_difference(before, copied(used)))
    assert norms[0] == pytest.approx(norms[2], rel=1e-5)
    assert moves[0] == pytest.approx(moves[1])
    assert moves[2] < 0.1 * moves[0]


@every_engine
def test_the_cosine_of_consecutive_gradients_is_that_of_full_gradients(tmp_path, engine):
    def gradient(twin, seed):
        accumulate(twin, make_microbatches(seed))
        gradients = [parameter.grad.flatten().clone() for parameter in twin.model.parameters()]
        twin.model.zero_grad()
        return torch.cat(gradients)

    twin, used = make_engine(tmp_path, TorchEngineConfig()), make_engine(tmp_path, engine)
    memory = GradientSimilarity(used.optimizer, seed=0)
    for seed in range(3):
        accumulate(used, make_microbatches(seed))
        used.step(learning_rate=0.0)
        memory.end_update()
    gradients = [gradient(twin, seed) for seed in range(3)]
    cosines = [torch.cosine_similarity(one, two, dim=0) for one, two in itertools.pairwise(gradients)]
    expected = float(sum(cosines)) / 2
    assert 0.01 < expected < 0.99
    assert memory.report(make_alone()) == {"learner/grad_cosine": pytest.approx(expected, rel=1e-4)}


@every_engine
def test_a_step_uses_the_given_learning_rate_and_clears_the_gradients(tmp_path, engine):
    engine = make_engine(tmp_path, engine, learning_rate=123.0)
    before, norms = copied(engine), []
    for rate in (1e-12, 1e-3):
        accumulate(engine, make_microbatches())
        norms.append(engine.step(learning_rate=rate))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    # With equal gradients, Adam moves every weight by at most the learning rate.
    assert 0.9e-3 < largest_difference(before, copied(engine)) < 1.01e-3


@every_engine
def test_a_gradient_that_is_not_finite_changes_no_weight_and_such_a_weight_is_named(tmp_path, engine):
    engine = make_engine(tmp_path, engine)
    before = copied(engine)
    accumulate(engine, make_microbatches(), factor=float("inf"))
    with pytest.raises(DivergenceError, match="gradient norm must be finite"):
        engine.step(learning_rate=1e-3)
    assert largest_difference(before, copied(engine)) == 0
    check = partial(check_finite, what="the weights", step=4, remedy="start again", ranks=make_alone())
    largest = torch.finfo(torch.float32).max
    # A sum that overflows is no such weight.
    for value, expected in ((largest, nullcontext()), (float("-inf"), pytest.raises(DivergenceError, match=NAMED))):
        with torch.no_grad():
            dict(engine.held_weights())["model.norm.weight"][-2:] = value
        with expected:
            check(engine.held_weights())


@every_engine
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_gathered_parameters_have_the_checkpoints_names_and_include_the_head(tmp_path, engine, is_tied):
    engine = make_engine(tmp_path, engine, is_tied=is_tied)
    gathered = copied(engine)
    twin = make_engine(tmp_path, TorchEngineConfig(), is_tied=is_tied)
    assert set(gathered) == set(twin.model.causal_lm.state_dict())
    assert "lm_head.weight" in gathered
    assert gathered["lm_head.weight"].equal(gathered["model.embed_tokens.weight"]) == is_tied
    assert largest_difference(gathered, copied(twin)) == 0


@every_engine
def test_a_forward_pass_without_gradient_does_not_change_the_next_step(tmp_path, engine):
    used, fresh = make_engine(tmp_path, engine), make_engine(tmp_path, engine)
    canary = torch.randint(0, 39, (2, 8)).numpy()
    layout = Layout("shared_rows", microbatch_tokens=64)
    before = canary_logprobs(used, canary, layout=layout)
    accumulate(used, make_microbatches())
    assert canary_logprobs(used, canary, layout=layout) == before
    accumulate(fresh, make_microbatches())
    assert used.step(learning_rate=1e-3) == pytest.approx(fresh.step(learning_rate=1e-3), rel=1e-6)


WHOLE = itertools.product(("torch", "zero-0"), ("muon", "adamw_8bit"))


@pytest.mark.parametrize("model", [{"dtype": "float32", "max_length": 64}, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("engine", "optimizer"), [*((name, "adamw") for name in ENGINES), *WHOLE])
def test_training_continues_bit_for_bit_from_the_saved_state(tmp_path, engine, optimizer, model):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    first, second = (make_engine(tmp_path, ENGINES[engine], name=optimizer, model=model) for _ in range(2))
    accumulate(first, make_microbatches())
    first.step(learning_rate=1e-3)
    save_file(first.copy_state(), tmp_path / STATE_FILE.format(0))
    second.restore_state(tmp_path)
    for each in (first, second):
        accumulate(each, make_microbatches(seed=1))
        each.step(learning_rate=1e-3)
    assert largest_difference(copied(first), copied(second)) == 0


def held_bytes(engine, microbatches):
    """Bytes of weights, gradients before the step, and optimizer state after it, per trained parameter."""
    trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    shapes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained]
    shards = [getattr(parameter, "ds_tensor", parameter) for parameter in trained]
    accumulate(engine, microbatches)
    stage, inner = getattr(engine, "_stage", 0), getattr(engine, "_engine", None)
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    if stage == 2:
        gradients = [each for group in inner.optimizer.all_grad_tensors.values() for each in group]
    if stage == 3:
        gradients = [inner.optimizer.grad_partitions_flat_buffer]
    num_gradients = sum(each.nbytes for each in gradients)
    engine.step(learning_rate=1e-6)
    held = {id(shard.master): shard.master for shard in engine._shards()}
    masters = [each for each in held.values() if all(each is not parameter for parameter in trained)]
    moments = [tensor for state in engine.optimizer.state.values() for tensor in state.values() if tensor.dim()]
    total = sum(each.nbytes for each in (*shards, *masters, *moments)) + num_gradients
    return total / sum(shapes)


@every_engine
def test_a_bfloat16_model_takes_16_bytes_per_parameter_with_masters_and_gradients(tmp_path, engine):
    exact = held_bytes(make_engine(tmp_path, engine), make_microbatches())
    rounded = held_bytes(make_engine(tmp_path, engine, model=HALF), make_microbatches())
    # ZeRO pads to multiples of its alignment.
    assert rounded == pytest.approx(16, rel=0.01)
    has_masters = getattr(engine, "zero_stage", 0) > 0
    assert exact == pytest.approx(20 if has_masters else 16, rel=0.01)


@every_engine
def test_updates_too_small_for_bfloat16_add_up_in_the_masters(tmp_path, engine):
    """A bfloat16 weight of 0.3 moves only by multiples of 2^-9, 2,000 times the learning rate."""
    used = make_engine(tmp_path, engine, model=HALF, learning_rate=1e-6)
    before, weights = used.copy_state(), copied(used)
    for _ in range(3):
        accumulate(used, make_microbatches())
        used.step(learning_rate=1e-6)
    after = used.copy_state()
    moved = {key: (after[key] - before[key]).abs() for key in before if key.startswith("weight/")}
    total = torch.cat([each.flatten() for each in moved.values()])
    # Adam moves each weight by the learning rate, three times in about the same direction, and float32 resolves it.
    assert 2e-6 < total.median() < 3.1e-6
    same = torch.cat([(weights[name] == tensor).flatten() for name, tensor in copied(used).items()])
    assert same.float().mean() > 0.95
    rate = 2**-8
    accumulate(used, make_microbatches())
    used.step(learning_rate=rate)
    rounded = {key.split("/", 2)[2]: each for key, each in used.copy_state().items() if key.startswith("weight/")}
    for name, tensor in copied(used).items():
        assert tensor.flatten().equal(rounded[name].flatten().bfloat16()), name


@every_engine
def test_an_adapter_trains_on_a_base_in_bfloat16_without_masters(tmp_path, engine):
    used = make_engine(tmp_path, engine, model=HALF | {"lora": LoraConfig(rank=4)}, learning_rate=1e-3)
    assert {tensor.dtype for _, tensor in used.gather_parameters(is_whole=True)} == {torch.bfloat16}
    before = {name: tensor.clone() for name, tensor in used.gather_parameters(is_whole=True)}
    accumulate(used, make_microbatches())
    used.step(learning_rate=1e-2)
    after = dict(used.gather_parameters(is_whole=True))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    assert all(".lora_" in name for name in changed)
    names = {key.split("/", 2)[2] for key in used.copy_state()}
    assert names == dict(used.model.weights()).keys()


def test_gradients_of_microbatches_add_up_in_bfloat16_within_the_rounding_of_one(tmp_path):
    """The sum of 8 parts rounds 8 times, which is less than what rounding activations changes."""
    exact = make_engine(tmp_path, TorchEngineConfig())
    whole, split = (make_engine(tmp_path, TorchEngineConfig(), model=HALF) for _ in range(2))
    microbatches = make_microbatches()
    for engine, parts in ((exact, 1), (whole, 1), (split, 8)):
        for _ in range(parts):
            accumulate(engine, microbatches, factor=1 / parts)

    def gradient(engine):
        return torch.cat([parameter.grad.flatten().double() for parameter in engine.model.parameters()])

    reference = gradient(exact)
    errors = [float((gradient(engine) - reference).norm() / reference.norm()) for engine in (whole, split)]
    assert errors[1] < 2 * errors[0] + 8 * 2**-9
    assert errors[0] < 0.1


@pytest.mark.parametrize(("stage", "per_microbatch"), [(1, False), (2, True), (3, True)])
def test_gradients_are_reduced_once_per_step_unless_ranks_hold_shards_of_them(
    tmp_path, stage, per_microbatch, monkeypatch
):
    engine, counts = make_engine(tmp_path, zero(stage)), []
    # DeepSpeed accepts it at ZeRO-2, too, where it doubles the buffer of gradients.
    assert engine._engine.zero_overlap_comm() == (stage == 3)
    zero_optimizer = engine._engine.optimizer
    name = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads" if stage == 3 else "average_tensor"
    original, calls = getattr(zero_optimizer, name), []

    def reduce(*arguments, **options):
        calls.append(name)
        return original(*arguments, **options)

    monkeypatch.setattr(zero_optimizer, name, reduce)
    microbatches = make_microbatches()
    for repeats in (1, 3):
        calls.clear()
        for _ in range(repeats):
            accumulate(engine, microbatches)
        engine.step(learning_rate=1e-6)
        counts.append(len(calls))
    assert counts[0] > 0
    assert counts[1] == (3 if per_microbatch else 1) * counts[0]
