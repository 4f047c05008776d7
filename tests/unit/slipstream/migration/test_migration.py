"""`slipstream import-config`: settings of verl and TRL become ours, which compose; those without an equal are named."""

import json
import re
import shlex
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.migration.command import import_settings
from slipstream.migration.translation import Imported, format_value
from tests.machines import needs_bubblewrap

VERL = """\
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case $DEVICE in gpu) n=5 ;; npu) n=3 ;; esac
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
HOSTS=$(scontrol show hostnames | wc -l)
uv sync --extra vllm
source /opt/venv/bin/activate
files="['$(cd "$(dirname "$0")" && pwd)/test.parquet', '$HOME/test.parquet']"
uv run python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$PWD/train.parquet \\
    data.val_files="$files" \\
    data.train_batch_size=1024 data.max_response_length=1024 data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.n=$n \\
    +trainer.made_up=3 trainer.n_gpus_per_node=8 trainer.total_training_steps=$((45 * 2)) $@  # comment
"""


def translated(folder: Path, trainer: str, text: str, *, suffix: str = ".yaml") -> tuple[RunConfig, Imported]:
    """The settings that a file becomes, and the translation."""
    path = folder / f"settings{suffix}"
    path.write_text(text)
    imported = import_settings(trainer, path)
    assert not [note for note in imported.notes if note.startswith("to resolve")], imported.notes
    return load(imported.overrides), imported


def verl(folder: Path, *lines: str) -> tuple[RunConfig, Imported]:
    shared = ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.model.path=m"]
    return translated(folder, "verl", json.dumps([*shared, *lines]))


@needs_bubblewrap
def test_a_script_of_verl_becomes_a_command_that_composes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, imported = translated(tmp_path, "verl", VERL, suffix=".sh")
    assert run.model.path == "Qwen/Qwen2.5-7B-Instruct"
    assert (run.learner.prompts_per_step, run.algorithm.updates_per_step, run.generators.group_size) == (1024, 4, 5)
    assert (run.algorithm.advantage.kind, run.algorithm.policy_loss.kind) == ("grpo", "ppo_clip")
    assert (run.algorithm.policy_loss.clip_low, run.algorithm.policy_loss.clip_high) == (0.2, 0.28)  # type: ignore[attr-defined]
    sets = [(f"{folder}/test.parquet", 0.0) for folder in (tmp_path, Path.home())]
    assert [(each.path, each.temperature) for each in run.data.eval_sets] == sets
    assert run.data.train == f"{Path.cwd()}/train.parquet"
    assert (run.learner.max_steps, run.learner.optimizer.learning_rate) == (90, 1e-6)
    assert (run.learner.optimizer.schedule, run.learner.optimizer.warmup_steps) == ("constant", 0)
    assert (run.staleness.max_lag, run.data.on_too_long, run.model.max_length) == (0, "skip", 1536)
    assert (run.prepare, run.evaluation.stop, run.evaluation.goals, run.algorithm.masks) == ([], None, [], [])
    assert imported.untranslated == ["trainer.made_up = 3"]
    assert imported.notes[0].startswith("the script called scontrol, which did not run")
    main(["import-config", "verl", str(tmp_path / "settings.sh")])
    printed = capsys.readouterr().out
    command, _, rest = printed.partition("\n\n")
    assert load(shlex.split(command.replace("\\\n", ""))[2:]) == run, "what is printed can be run"
    assert "Without equivalent:\n  trainer.made_up = 3" in rest


@pytest.mark.parametrize(
    ("setting", "ours"),
    [
        ("algorithm.adv_estimator=rloo", {"advantage.kind": "rloo"}),
        ("algorithm.norm_adv_by_std_in_grpo=False", {"advantage.kind": "dr_grpo"}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", {"loss_aggregation": "seq_mean_token_mean"}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl", {"policy_loss.divergence": "kl"}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", {"policy_loss.tau_negative": 1.05}),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", {"loss_aggregation": "seq_mean_token_sum"}),
        ("actor_rollout_ref.actor.use_kl_loss=True", {"kl.coef": 0.001, "kl.estimator": "k3"}),
        ("algorithm.use_kl_in_reward=True", {"kl.apply_to": "reward", "kl.estimator": "k1"}),
        ("algorithm.rollout_correction.rollout_is=token", {"correction.level": "token", "correction.max_weight": 2.0}),
        ("algorithm.rollout_correction.bypass_mode=True", {"proximal": "generator", "correction.level": "none"}),
    ],
)  # fmt: skip
def test_the_objective_of_verl_is_ours(tmp_path: Path, setting: str, ours: dict[str, object]) -> None:
    run, _ = verl(tmp_path, "data.train_batch_size=256", "algorithm.adv_estimator=grpo", setting)
    for key, value in ours.items():
        found: object = run.algorithm
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value, key


def test_bounds_rejections_epochs_rewards_and_lag_of_verl(tmp_path: Path) -> None:
    key = "algorithm.rollout_correction"
    lines = [f"{key}.rollout_is=sequence", f'{key}.rollout_is_threshold="0.5_5.0"', "algorithm.adv_estimator=grpo"]
    lines += [f"{key}.rollout_rs=seq_mean_k3,token_k1", f'{key}.rollout_rs_threshold="0.01,0.5_2.0"']
    correction = verl(tmp_path, *lines)[0].algorithm.correction
    assert (correction.level, correction.outside) == ("sequence", "mask")
    assert (correction.min_weight, correction.max_weight) == (0.5, 5.0)
    rejections = [(each.statistic, each.over, each.low, each.high) for each in correction.reject]
    assert rejections == [("k3", "mean", None, 0.01), ("k1", "token", 0.5, 2.0)]
    run, imported = verl(tmp_path, "trainer.total_epochs=4", "algorithm.adv_estimator=grpo")
    assert (run.learner.epochs, run.learner.num_ranks, run.generators.count) == (4, 4, 2)
    assert any("8 GPUs" in note for note in imported.notes)
    run, _ = verl(tmp_path, "trainer.total_epochs=4", "trainer.total_training_steps=9", "algorithm.adv_estimator=grpo")
    assert (run.learner.epochs, run.learner.max_steps) == (None, 9)
    lines = ["async_training.staleness_threshold=0.5", "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=2"]
    lines += ["reward.custom_reward_function.path=mine.py", "reward.custom_reward_function.reward_kwargs.strict=2"]
    lines += ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "algorithm.adv_estimator=grpo"]
    run, _ = verl(tmp_path, *lines)
    assert (run.generators.count, run.learner.num_ranks, run.staleness.max_lag) == (2, 2, 2)
    assert (run.generators.reward.function, run.generators.reward.arguments) == ("mine.py:compute_score", {"strict": 2})


TRL = """\
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: trl-lib/math
learning_rate: 2e-6
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 8
max_completion_length: 1024
max_steps: 400
warmup_steps: 15
beta: 4e-2
loss_type: dr_grpo
scale_rewards: none
top_entropy_quantile: 0.2
logging_steps: 1
made_up: 1
"""


def test_a_file_of_trl_composes(tmp_path: Path) -> None:
    run, imported = translated(tmp_path, "trl", TRL)
    assert (run.generators.group_size, run.learner.prompts_per_step, run.algorithm.updates_per_step) == (8, 8, 2)
    assert (run.learner.max_steps, run.learner.checkpoint.every_steps) == (200, 250)
    assert run.learner.optimizer.warmup_steps == 8, "TRL counts updates"
    assert (run.algorithm.advantage.kind, run.algorithm.loss_aggregation) == ("dr_grpo", "seq_mean_token_sum_norm")
    assert (run.algorithm.kl.coef, run.algorithm.kl.estimator) == (0.04, "k3_off_policy")
    assert run.algorithm.correction.level == "none", "without vLLM there is nothing to correct"
    assert imported.untranslated == ["made_up = 1"]
    assert any(note.startswith("top_entropy_quantile=0.2: there is no mask") for note in imported.notes)


def test_the_losses_and_weights_of_trl(tmp_path: Path) -> None:
    run, _ = translated(tmp_path, "trl", "num_generations: 8\nuse_vllm: true\nimportance_sampling_level: sequence\n")
    assert run.algorithm.policy_loss.kind == "gspo"
    assert (run.algorithm.correction.level, run.algorithm.correction.outside) == ("sequence", "mask")
    for kind, ours in (("cispo", "cispo"), ("sapo", "sapo"), ("vespo", "vespo")):
        run, _ = translated(tmp_path, "trl", f"num_generations: 8\nloss_type: {kind}\n")
        assert run.algorithm.policy_loss.kind == ours
    rslora = "num_generations: 8\nuse_peft: true\nlora_r: 4\nlora_alpha: 6\nuse_rslora: true\n"
    assert translated(tmp_path, "trl", rslora)[0].model.lora.alpha == 12, "6 / sqrt(4) = 12 / 4"
    run, _ = translated(tmp_path, "trl", "num_generations: 8\nmax_staleness: 4\nweight_sync_steps: 2\n")
    assert (run.staleness.max_lag, run.weights.publish_every_steps) == (4, 2)


@pytest.mark.parametrize(
    ("trainer", "text", "reason"),
    [
        ("verl", "a: 1", "FILE must hold settings of verl"),
        ("trl", "a: 1", "FILE must hold settings of TRL's GRPO"),
        ("verl", "", "it must be a record of settings"),
        ("verl", "a: [", "FILE must be YAML, TOML, JSON, or a shell script"),
        ("trl", "num_generations: 3", "num_generations must divide"),
        ("verl", "trainer.nnodes: $N\nactor_rollout_ref.rollout.n: 4", "f.yaml with trainer.nnodes=$N: replace"),
        ("trl", "num_generations: 8\nbeta: little", "f.yaml with '>' not supported between"),
    ],
)
def test_what_is_no_file_of_settings_is_refused(tmp_path: Path, trainer: str, text: str, reason: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        import_settings(trainer, tmp_path / "f.yaml")
    with pytest.raises(ConfigError, match="FILE must exist"):
        import_settings(trainer, tmp_path / "nosuch.yaml")


@pytest.mark.parametrize("value", ["plain", "with space", "it's", "null", "a,b", "back\\slash", [1, "x y"], 1e-6, True])
def test_values_are_read_as_they_were_written(value: object) -> None:
    if isinstance(value, str):
        assert load(["model.path=m", f"data.train={format_value(value)}"]).data.train == value
    else:
        assert format_value(value) in ("[1, 'x y']", "1e-6", "true")
