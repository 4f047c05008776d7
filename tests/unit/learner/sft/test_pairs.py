import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from slipstream.configs.base import ConfigError
from slipstream.configs.data import SftConfig
from slipstream.configs.learner import OptimizerConfig, TorchEngineConfig
from slipstream.generators.rewards.reward_model import RewardModel
from slipstream.learner.sft.dataset import Pair, read_train
from slipstream.learner.sft.run import PairTrainer
from slipstream.runtime.model_files import answer_token_ids
from tests.tiny_model import make_tokenizer
from tests.unit.learner.builders import VOCABULARY, make_alone, make_model, make_run, make_trainer, weights, zero
from tests.unit.learner.sft.test_dataset import make_file, sft_run
from tests.unit.learner.sft.test_run import make_sft_run, train

PLAIN = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", max_grad_norm=1.0)


def make_pairs(count=5, *, seed=0):
    random = np.random.default_rng(seed)
    prompts = [random.integers(2, VOCABULARY, size=int(random.integers(1, 6))) for _ in range(count)]
    return [
        Pair(*(np.append(prompt, random.integers(2, VOCABULARY, size=int(random.integers(1, 7)))) for _ in range(2)))
        for prompt in prompts
    ]


def make_pair_trainer(folder, *, engine=None, tokens_per_microbatch=8192):
    learner = {"engine": engine or TorchEngineConfig(), "optimizer": PLAIN}
    learner["tokens_per_microbatch"] = tokens_per_microbatch
    sft = SftConfig("a", objective="pairs", trajectories_per_step=4)
    run = make_run(make_model(folder), learner=learner, mode="sft", sft=sft)
    torch.manual_seed(3)
    trainer = make_trainer(run)
    return PairTrainer(run, trainer=trainer, ranks=make_alone(), num_steps=4), trainer


def test_a_step_is_the_textbooks_and_any_split_gives_the_same_gradient(tmp_path):
    pairs = make_pairs(16)
    torch.manual_seed(3)
    module = AutoModelForSequenceClassification.from_pretrained(make_model(tmp_path), num_labels=1)
    torch_trainer, trainer = make_pair_trainer(tmp_path)
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

    split, other = make_pair_trainer(tmp_path, engine=zero(2), tokens_per_microbatch=64)
    assert split.step(pairs, step=1)["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for each in (trainer, other):
        for name, parameter in module.named_parameters():
            # Adam's first step is the sign of the gradient, so it is noise where the gradient is.
            clear = parameter.grad.abs() > 1e-5
            assert torch.allclose(weights(each)[name][clear], parameter[clear], atol=2e-5), name


def test_a_run_learns_the_pairs_and_its_model_scores_alike_in_transformers_and_as_a_reward(tmp_path):
    rows = [{"prompt": f"{n:03d}=", "chosen": f"{n:03d}"[::-1], "rejected": f"{n:03d}"} for n in range(123, 170)]
    files = {"train_path": rows, "heldout_path": rows[:10]}
    run = make_sft_run(tmp_path, steps=20, objective="pairs", heldout_every_steps=10)
    paths = {name: make_file(tmp_path, content, f"{name}.parquet") for name, content in files.items()}
    run = msgspec.structs.replace(run, sft=msgspec.structs.replace(run.sft, **paths))
    written, summary, _ = train(run)
    assert summary["heldout_pair_accuracy"] >= 0.9
    assert summary["heldout_loss"] < 0.7 * summary["heldout_loss_before"]
    assert written[-1]["eval/pair_accuracy"] == summary["heldout_pair_accuracy"]

    path = str(tmp_path / "runs" / run.name / "final_model")
    module = AutoModelForSequenceClassification.from_pretrained(path)
    reward = RewardModel(path=path, device="cpu")
    reward.start()
    batch = [answer_token_ids(make_tokenizer(), row["prompt"], row["chosen"]) for row in rows[:3]]
    batch.append(batch[0][:5])
    with torch.inference_mode():
        alone = [float(module(input_ids=torch.tensor(own)[None]).logits) for own in batch]
    assert reward.scores(batch) == pytest.approx(alone, abs=1e-5)
    # A language model has no reward head: its scores would be random.
    with pytest.raises(ConfigError, match=r"which lacks score\.weight: train one with experiment=reward_model"):
        RewardModel(path=str(make_model(tmp_path))).start()


def say(role, text):
    return {"role": role, "content": text}


TEXT = {"prompt": "1=", "chosen": "2", "rejected": "3"}
WHOLE = {side: [say("user", "1"), say("assistant", text)] for side, text in (("chosen", "2"), ("rejected", "3"))}


def read_pairs(folder, row):
    template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    (pair,) = read_train(sft_run(folder, [row], objective="pairs", template=template)).demonstrations
    return [make_tokenizer().decode(side) for side in (pair.chosen, pair.rejected)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (TEXT, ["1=2<eos>", "1=3<eos>"]),
        (TEXT | {"prompt": [say("user", "1")]}, ["1=2=", "1=3="]),
        ({"prompt": "1", "chosen": WHOLE["chosen"][1:], "rejected": WHOLE["rejected"][1:]}, ["1=2=", "1=3="]),
        (WHOLE, ["1=2=", "1=3="]),
    ],
)
def test_pairs_are_texts_or_messages(tmp_path, row, expected):
    assert read_pairs(tmp_path, row) == expected


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (TEXT | {"chosen": ""}, "row 0: the response must not be empty"),
        ({"prompt": "1=", "chosen": "2"}, "must have the column `rejected`"),
    ],
)
def test_incomplete_pairs_are_refused(tmp_path, row, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_pairs(tmp_path, row)
