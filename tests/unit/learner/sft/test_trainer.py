import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from slipstream.configs.data import SftConfig
from slipstream.configs.learner import OptimizerConfig, TorchEngineConfig
from slipstream.learner.errors import DivergenceError
from slipstream.learner.sft.dataset import Demonstration, Pair
from slipstream.learner.sft.run import PairTrainer, SftTrainer, count_tokens, to_samples
from tests.tiny_model import make_tiny_module
from tests.unit.learner.builders import VOCABULARY, make_alone, make_model, make_run, make_trainer, weights, zero

PLAIN = {"learning_rate": 1e-3, "warmup_steps": 0, "schedule": "constant", "max_grad_norm": 1.0}
ENGINES = {"torch": TorchEngineConfig(), **{f"zero-{stage}": zero(stage) for stage in range(4)}}


def make_demonstrations(count=6, *, seed=0):
    """Random tokens, with gaps in the mask as in multi-turn conversations."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(random.integers(2, 14))
        mask = random.random(length) < 0.6
        mask[-1] = True
        made.append(Demonstration(random.integers(2, VOCABULARY, size=length), mask))
    return made


def make_trainer_of(kind, folder, *, engine=ENGINES["torch"], tokens_per_microbatch=8192, batch=4, **optimizer):
    """An SftTrainer or a PairTrainer, and the trainer that it uses."""
    learner = {"engine": engine, "tokens_per_microbatch": tokens_per_microbatch}
    learner["optimizer"] = OptimizerConfig(**optimizer)
    objective = "pairs" if kind is PairTrainer else "demonstrations"
    sft = SftConfig("a", objective=objective, batch_size=batch)
    run = make_run(make_model(folder), learner=learner, mode="sft", sft=sft)
    torch.manual_seed(3)
    trainer = make_trainer(run)
    return kind(run, trainer=trainer, ranks=make_alone(), num_steps=4), trainer


def make_sft_trainer(folder, **settings):
    return make_trainer_of(SftTrainer, folder, **settings)


def make_pairs(count=5, *, seed=0):
    random = np.random.default_rng(seed)
    prompts = [random.integers(2, VOCABULARY, size=int(random.integers(1, 6))) for _ in range(count)]
    return [
        Pair(*(np.append(prompt, random.integers(2, VOCABULARY, size=int(random.integers(1, 7)))) for _ in range(2)))
        for prompt in prompts
    ]


def plain_loss(module, demonstrations):
    """Textbook loss: right padding, masked labels, and torch's cross-entropy."""
    length = max(d.num_tokens for d in demonstrations)
    ids = torch.zeros(len(demonstrations), length, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, d in enumerate(demonstrations):
        ids[row, : d.num_tokens] = torch.from_numpy(d.token_ids.astype(np.int64))
        labels[row, : d.num_tokens] = torch.from_numpy(np.where(d.model_mask, d.token_ids, -100).astype(np.int64))
    logits = module(input_ids=ids).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def plain_steps(batches, **optimizer):
    """Textbook training loop: clipping, then AdamW."""
    module = make_tiny_module().train()
    adamw = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.99), weight_decay=0.0, **optimizer)
    losses, norms = [], []
    for batch in batches:
        loss = plain_loss(module, batch)
        adamw.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0).item())
        adamw.step()
        losses.append(loss.item())
    return losses, norms, module


def gradients(folder, demonstrations, *, tokens_per_microbatch):
    """Gradients of a step by name, recorded before the optimizer clears them."""
    sft, trainer = make_sft_trainer(folder, tokens_per_microbatch=tokens_per_microbatch, max_grad_norm=1e9)
    module = trainer.engine.model.causal_lm
    caught = {}
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: caught.update({name: p.grad.clone()}))
    sft.step(demonstrations, step=1)
    return caught


@pytest.mark.parametrize(("tokens_per_microbatch", "num_microbatches"), [(8192, 1), (64, 4)])
def test_the_gradient_matches_plain_cross_entropy(tmp_path, tokens_per_microbatch, num_microbatches):
    demonstrations = make_demonstrations(32)
    _, trainer = make_sft_trainer(tmp_path, tokens_per_microbatch=tokens_per_microbatch)
    assert len(trainer.collate(to_samples(demonstrations))) == num_microbatches
    module = make_tiny_module().train()
    plain_loss(module, demonstrations).backward()
    found = gradients(tmp_path, demonstrations, tokens_per_microbatch=tokens_per_microbatch)
    assert found.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-6, rtol=1e-4), name


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_three_steps_match_a_plain_loop(tmp_path, engine):
    batches = [make_demonstrations(seed=seed) for seed in range(3)]
    losses, norms, module = plain_steps(batches, lr=1e-4)
    sft, trainer = make_sft_trainer(tmp_path, engine=engine, tokens_per_microbatch=64, learning_rate=1e-4)
    rows = [sft.step(batch, step=index + 1) for index, batch in enumerate(batches)]
    assert [row["learner/loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["learner/grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    assert [row["learner/tokens"] for row in rows] == [count_tokens(batch) for batch in batches]
    with torch.no_grad():
        assert sft.measure(batches[0])["eval/loss"] == pytest.approx(plain_loss(module, batches[0]).item(), rel=1e-4)
    found, expected = weights(trainer), dict(module.named_parameters())
    assert max(float((found[name] - parameter.detach()).abs().max()) for name, parameter in expected.items()) < 1e-5


def test_the_loss_weighs_tokens_equally_for_any_batch_size(tmp_path):
    demonstrations = make_demonstrations(11)
    expected = plain_loss(make_tiny_module(), demonstrations).item()
    for batch in (1, 4, 64):
        sft, trainer = make_sft_trainer(tmp_path, batch=batch)
        before = weights(trainer)
        assert sft.measure(demonstrations)["eval/loss"] == pytest.approx(expected, rel=1e-5)
        assert all(tensor.equal(before[name]) for name, tensor in weights(trainer).items())


def test_the_rate_follows_the_schedule_of_the_whole_run(tmp_path):
    sft, _ = make_sft_trainer(tmp_path, schedule="linear", warmup_steps=1, learning_rate=3e-4)
    rates = [sft.step(make_demonstrations(), step=step)["learner/learning_rate"] for step in (1, 2, 3, 4)]
    assert rates == pytest.approx([3e-4, 3e-4, 2e-4, 1e-4])


def test_a_token_that_the_model_finds_impossible_has_no_loss_and_is_counted(tmp_path):
    impossible = Demonstration(np.array([4, 8, 5]), np.array([False, True, True]))
    sft, trainer = make_sft_trainer(tmp_path)
    # Make the model compute logits itself, so the hook can change them.
    trainer.engine.model.head = None
    head = trainer.engine.model.causal_lm.lm_head
    head.register_forward_hook(lambda _module, _inputs, logits: logits.index_fill(-1, torch.tensor([5]), -torch.inf))
    # The other token's softmax also excludes it.
    logits = make_tiny_module()(input_ids=torch.tensor([[4, 8]])).logits[0]
    expected = -logits.index_fill(-1, torch.tensor([5]), -torch.inf).log_softmax(-1)[0, 8].item()
    assert sft.measure([impossible])["eval/loss"] == pytest.approx(expected, rel=1e-5)
    metrics = sft.step([impossible], step=1)
    assert metrics["learner/loss"] == pytest.approx(expected / 2, rel=1e-5)
    assert metrics["learner/nonfinite_fraction"] == 0.5
    assert np.isfinite(metrics["learner/grad_norm"])
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    sft, trainer = make_sft_trainer(tmp_path)
    with torch.no_grad():
        next(trainer.engine.model.causal_lm.parameters()).fill_(float("nan"))
    with pytest.raises(DivergenceError, match="step 3"):
        sft.step(make_demonstrations(), step=3)


def test_demonstrations_that_leak_into_each_other_stop_the_run(tmp_path):
    sft, trainer = make_sft_trainer(tmp_path)
    sft.step(make_demonstrations(), step=1)
    layer = trainer.engine.model.causal_lm.model.layers[-1]
    layer.register_forward_hook(lambda *parts: parts[2] + 1e-3 * parts[2].mean(dim=1, keepdim=True))
    with pytest.raises(DivergenceError, match="independently of its row neighbors"):
        sft.step(make_demonstrations(), step=21)


def test_samples_are_consecutive_and_share_no_prompt():
    demonstrations = make_demonstrations(5)
    samples = to_samples(demonstrations)
    assert [p for sample in samples for p in sample.indices.tolist()] == list(range(count_tokens(demonstrations)))
    assert len({sample.group_id for sample in samples}) == 5
    assert {sample.temperature for sample in samples} == {1.0}


def test_a_step_on_pairs_is_the_textbooks_and_any_split_gives_the_same_gradient(tmp_path):
    pairs = make_pairs(16)
    torch.manual_seed(3)
    module = AutoModelForSequenceClassification.from_pretrained(make_model(tmp_path), num_labels=1)
    torch_trainer, trainer = make_trainer_of(PairTrainer, tmp_path, **PLAIN)
    module.load_state_dict(weights(trainer))
    # One pair at a time, with transformers' own head.
    margins = torch.stack([
        module(input_ids=torch.tensor(pair.chosen)[None]).logits[0, 0]
        - module(input_ids=torch.tensor(pair.rejected)[None]).logits[0, 0]
        for pair in pairs
    ])  # fmt: skip
    expected = torch.log1p(torch.exp(-margins)).mean()
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0).step()

    metrics = torch_trainer.step(pairs, step=1)
    assert metrics["learner/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["learner/pair_accuracy"] == float((margins > 0).float().mean())
    assert metrics["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-4)

    split, other = make_trainer_of(PairTrainer, tmp_path, engine=ENGINES["zero-2"], tokens_per_microbatch=64, **PLAIN)
    assert split.step(pairs, step=1)["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for each in (trainer, other):
        for name, parameter in module.named_parameters():
            # Adam's first step is the sign of the gradient, so it is noise where the gradient is.
            clear = parameter.grad.abs() > 1e-5
            assert torch.allclose(weights(each)[name][clear], parameter[clear], atol=2e-5), name
