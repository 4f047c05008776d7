"""`slipstream import-config`: settings of verl and TRL become ours, which compose; those without an equal are named."""

import json
import re
import shlex
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import InteractionAgentConfig, ToolsAgentConfig
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.configs.schema import groups, settings
from slipstream.migration.command import TRAINERS, import_settings
from slipstream.migration.translation import Imported, format_value
from tests.cases import cases
from tests.machines import needs_bubblewrap
from tests.shape.tree import text

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


def imported(folder: Path, trainer: str, content: str, *, name: str = "f.yaml") -> Imported:
    (folder / name).write_text(content)
    return import_settings(trainer, folder / name)


def translated(folder: Path, trainer: str, content: str, *, name: str = "f.yaml") -> tuple[RunConfig, Imported]:
    """The settings that a file becomes, and the translation."""
    found = imported(folder, trainer, content, name=name)
    assert not [note for note in found.notes if note.startswith("to resolve")], found.notes
    return load(found.overrides), found


def verl(folder: Path, *lines: str) -> tuple[RunConfig, Imported]:
    shared = ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo"]
    return translated(folder, "verl", json.dumps([*shared, *lines]))


@needs_bubblewrap
def test_a_script_of_verl_becomes_a_command_that_composes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, found = translated(tmp_path, "verl", VERL, name="settings.sh")
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
    assert found.untranslated == ["trainer.made_up = 3"]
    assert found.notes[0].startswith("the script called scontrol, which did not run")
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
    run, _ = verl(tmp_path, "data.train_batch_size=256", setting)
    for key, value in ours.items():
        found: object = run.algorithm
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value, key


def test_bounds_rejections_epochs_rewards_and_lag_of_verl(tmp_path: Path) -> None:
    key = "algorithm.rollout_correction"
    lines = [f"{key}.rollout_is=sequence", f'{key}.rollout_is_threshold="0.5_5.0"']
    lines += [f"{key}.rollout_rs=seq_mean_k3,token_k1", f'{key}.rollout_rs_threshold="0.01,0.5_2.0"']
    correction = verl(tmp_path, *lines)[0].algorithm.correction
    assert (correction.level, correction.outside) == ("sequence", "mask")
    assert (correction.min_weight, correction.max_weight) == (0.5, 5.0)
    rejections = [(each.statistic, each.over, each.low, each.high) for each in correction.reject]
    assert rejections == [("k3", "mean", None, 0.01), ("k1", "token", 0.5, 2.0)]
    run, found = verl(tmp_path, "trainer.total_epochs=4")
    assert (run.learner.epochs, run.learner.num_ranks, run.generators.count) == (4, 4, 2)
    assert any("8 GPUs" in note for note in found.notes)
    run, _ = verl(tmp_path, "trainer.total_epochs=4", "trainer.total_training_steps=9")
    assert (run.learner.epochs, run.learner.max_steps) == (None, 9)
    lines = ["async_training.staleness_threshold=0.5", "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=2"]
    lines += ["reward.custom_reward_function.path=mine.py", "reward.custom_reward_function.reward_kwargs.strict=2"]
    run, _ = verl(tmp_path, *lines, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert (run.generators.count, run.learner.num_ranks, run.staleness.max_lag) == (2, 2, 2)
    assert (run.generators.reward.function, run.generators.reward.arguments) == ("mine.py:compute_score", {"strict": 2})


TRL = """\
{model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct, dataset_name: trl-lib/math, learning_rate: 2e-6, loss_type: dr_grpo,
per_device_train_batch_size: 8, gradient_accumulation_steps: 4, steps_per_generation: 8, max_completion_length: 1024,
max_steps: 400, warmup_steps: 15, beta: 4e-2, scale_rewards: none, top_entropy_quantile: 0.2, logging_steps: 1,
made_up: 1}
"""


def test_a_file_of_trl_composes_with_its_losses_and_weights(tmp_path: Path) -> None:
    run, found = translated(tmp_path, "trl", TRL)
    assert (run.generators.group_size, run.learner.prompts_per_step, run.algorithm.updates_per_step) == (8, 8, 2)
    assert (run.learner.max_steps, run.learner.checkpoint.every_steps) == (200, 250)
    assert run.learner.optimizer.warmup_steps == 8, "TRL counts updates"
    assert (run.algorithm.advantage.kind, run.algorithm.loss_aggregation) == ("dr_grpo", "seq_mean_token_sum_norm")
    assert (run.algorithm.kl.coef, run.algorithm.kl.estimator) == (0.04, "k3_off_policy")
    assert run.algorithm.correction.level == "none", "without vLLM there is nothing to correct"
    assert found.untranslated == ["made_up = 1"]
    assert any(note.startswith("top_entropy_quantile=0.2: there is no mask") for note in found.notes)
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


@cases(
    "trainer, text, reason",
    ("verl", "a: 1", "FILE must hold settings of verl"),
    ("trl", "a: 1", "FILE must hold settings of TRL's GRPO"),
    ("verl", "", "it must be a record of settings"),
    ("verl", "a: [", "FILE must be YAML, TOML, JSON, or a shell script"),
    ("trl", "num_generations: 3", "num_generations must divide"),
    ("verl", "trainer.nnodes: $N\nactor_rollout_ref.rollout.n: 4", "f.yaml with trainer.nnodes=$N: replace"),
    ("trl", "num_generations: 8\nbeta: little", "f.yaml with '>' not supported between"),
    ("trl", "num_generations: 0", "f.yaml with integer"),
    ("openrlhf", "a: 1", "FILE must hold settings of"),
    ("prime-rl", "a: 1", "FILE must hold settings of"),
)
def test_what_is_no_file_of_settings_is_refused(tmp_path: Path, trainer: str, text: str, reason: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        import_settings(trainer, tmp_path / "f.yaml")
    with pytest.raises(ConfigError, match="FILE must exist"):
        import_settings(trainer, tmp_path / "nosuch.yaml")


@cases("value", "plain", "with space", "it's", "null", "a,b", "back\\slash")
def test_a_text_is_read_as_it_was_written(value: str) -> None:
    assert load(["model.path=m", f"data.train={format_value(value)}"]).data.train == value
    assert [*map(format_value, ([1, "x y"], 1e-6, True))] == ["[1, 'x y']", "1e-6", "true"]


OPENRLHF = """\
args=(--pretrain m --prompt_data json@rows.jsonl --input_key question --label_key answer)
run() { ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray "$@"; }
if [ -n "$SLURM_JOB_ID" ]; then n=64; else n=8; fi
run "${args[@]}" --advantage_estimator group_norm --n_samples_per_prompt $n --rollout_batch_size 128 \\
    --train_batch_size 256 --eps_clip_low_high 0.2 0.27 --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \\
    --dynamic_filtering --dynamic_filtering_reward_range 0 1 --actor_num_gpus_per_node 4 --vllm_num_engines 2 \\
    --vllm_tensor_parallel_size 2 --zero_stage 3 --adam_offload --enable_vllm_is_correction --async_train \\
    --prompt_max_len 512 --generate_max_len 1024 --use_dynamic_batch --use_wandb SECRET --wandb_project mine \\
    --lr_scheduler constant --remote_rm_url grade.py --packing_samples --made_up 3
"""

PRIME_RL = """\
max_steps = 40
seq_len = 4096
model.name = "m"
wandb.project = "mine"
deployment = { num_train_gpus = 2, num_infer_gpus = 4 }
inference.parallel.tp = 2

[trainer]
optim.lr = 1e-5
model = { impl = "custom", ac = {}, lora.rank = 8 }

[orchestrator]
batch_size = 128
group_size = 16
train.sampling.max_completion_tokens = 512
train.env = [{ taskset = { id = "wiki", split = "train" } }]
made.up = 3
"""


@needs_bubblewrap
def test_a_script_of_openrlhf_becomes_a_command_that_composes(tmp_path: Path) -> None:
    found = imported(tmp_path, "openrlhf", OPENRLHF, name="run.sh")
    run = load(found.overrides)
    assert (run.model.path, run.data.train) == ("m", "rows.jsonl")
    assert run.data.columns == {"prompt": "question", "ground_truth": "answer"}
    assert (run.generators.group_size, run.learner.prompts_per_step, run.algorithm.updates_per_step) == (8, 128, 4)
    assert (run.algorithm.advantage.kind, run.algorithm.policy_loss.kind) == ("grpo", "ppo_clip")
    assert (run.algorithm.policy_loss.clip_low, run.algorithm.policy_loss.clip_high) == (0.2, 0.27)  # type: ignore[attr-defined]
    assert (run.algorithm.kl.coef, run.algorithm.kl.apply_to) == (0.001, "loss")
    assert (run.algorithm.correction.min_weight, run.algorithm.correction.outside) == (0.5, "mask")
    assert (run.learner.num_ranks, run.generators.count, run.staleness.max_lag) == (4, 2, 2)
    assert (run.learner.engine.zero_stage, run.learner.epochs, run.model.max_length) == (3, 1, 1536)
    assert run.logging.backends == {"wandb": {"project": "mine"}}
    assert found.untranslated == ["made_up = 3"]
    assert any(line.endswith("packing_samples=true") for line in found.decided)
    assert "SECRET" not in str(found), "keys of services are not printed"


def test_files_of_prime_rl_become_a_command_that_composes(tmp_path: Path) -> None:
    found = imported(tmp_path, "prime-rl", PRIME_RL, name="rl.toml")
    run = load([*found.overrides, "data.train=rows.jsonl"])
    assert (run.model.path, run.model.max_length, run.generators.sampling.max_tokens) == ("m", 4096, 512)
    assert (run.generators.group_size, run.learner.prompts_per_step, run.learner.max_steps) == (16, 8, 40)
    assert (run.learner.num_ranks, run.generators.count) == (2, 2)
    assert (run.algorithm.advantage.kind, run.algorithm.policy_loss.kind) == ("dr_grpo", "dppo")
    assert (run.algorithm.proximal, run.algorithm.correction.log_ratio_penalty) == ("generator", 1e-3)
    assert run.model.lora
    assert (run.model.lora.rank, run.model.lora.alpha) == (8, 32)
    assert run.learner.engine.gradient_checkpointing
    assert run.generators.agent.environment == "wiki"  # type: ignore[union-attr]
    assert run.generators.agent.arguments == {"split": "train"}  # type: ignore[union-attr]
    assert found.untranslated == ["orchestrator.made.up = 3"]
    assert any("trainer.model.impl=custom" in line for line in found.decided)


def test_the_parts_of_prime_rl_are_read_from_one_folder(tmp_path: Path) -> None:
    (tmp_path / "orchestrator.toml").write_text("batch_size = 64\nmax_steps = 7\n[train]\ngroup_size = 4\n")
    (tmp_path / "train.toml").write_text('max_steps = 7\n[model]\nname = "m"\n[optim]\nlr = 2e-6\n')
    (tmp_path / "infer.toml").write_text("[vllm]\ntensor_parallel_size = 2\n")
    found = import_settings("prime-rl", tmp_path)
    run = load([*found.overrides, "data.train=rows.jsonl"])
    assert (run.learner.prompts_per_step, run.generators.group_size, run.learner.max_steps) == (64, 4, 7)
    assert (run.learner.optimizer.learning_rate, run.generators.engine.num_workers) == (2e-6, 2)
    assert found.untranslated == []


DISTILL = "distillation: {enabled: true,"
CASES: dict[str, dict[str, str]] = {
    "verl": {
        "trainer.logger: [console, wandb, mlflow]\ntrainer.project_name: p": "logging.backends={wandb: {project: p}}",
        "reward_model.enable: true\nreward_model.model.path: r": "generators.reward.arguments={path: r}",
        "reward.reward_model: {enable: true, model_path: r}": "generators.reward.function=reward_model",
        "custom_reward_function.path: f.py\ncustom_reward_function.name: g": "generators.reward.function='f.py:g'",
        "critic.optim.lr: 2e-5\nalgorithm.adv_estimator: gae": "algorithm.critic.optimizer.learning_rate=0.00002",
        "data.image_key: figures": "data.columns={images: figures}",
        "data.apply_chat_template_kwargs: {thinking: false}": "model.chat_template_kwargs={thinking: false}",
        "actor_rollout_ref.rollout: {val_kwargs: {temperature: 0.7, top_p: 0.9, n: 2}}\ndata.val_files: a.b": (
            "data.eval=[{name: a, path: a.b, samples: 2, temperature: 0.7, top_p: 0.9, top_k: -1}]"
        ),
        f"{DISTILL} distillation_loss: {{use_task_rewards: false}}}}": "algorithm/advantage=moving_baseline",
        f"{DISTILL} teacher_models: {{t: {{model_path: big}}}}}}": "algorithm.distillation.teacher_path=big",
        "distillation: {enabled: true, distillation_loss: {topk: 8}}": "algorithm.distillation.top_k=8",
        "actor_rollout_ref.actor.clip_ratio: 0.3": "algorithm.policy_loss.clip_high=0.2",
        "actor_rollout_ref.rollout.agent.default_agent_loop: tool_agent": "generators/agent=tools",
        "data.train_files: ${oc.env:NOSUCH,here}/a.parquet\ndata.seed: 1": "data.train=here/a.parquet",
    },
    "trl": {
        "chat_template_kwargs: '{\"enable_thinking\": false}'": "model.chat_template_kwargs={enable_thinking: false}",
        "num_train_epochs: 1.5": "learner.epochs=2",
        "report_to: [tensorboard, swanlab]": "logging.backends=[tensorboard]",
        "torch_dtype: float16": "model.dtype=float16",
    },
    "openrlhf": {
        "advantage_estimator: gae\ncritic_learning_rate: 2e-5": "algorithm.critic.optimizer.learning_rate=0.00002",
        "algo.kl.target: 0.1": "algorithm.kl.adaptive={target: 0.1, horizon: 10000}",
        "actor.policy_loss_type: gspo": "algorithm.loss_aggregation=seq_mean_token_mean",
        "eval.dataset: a/test.jsonl": "data.eval=[{name: a_test, path: a/test.jsonl, samples: 4, temperature: 0.6}]",
    },
    "prime-rl": {
        "orchestrator.algo.type: max_rl": "algorithm/advantage=maxrl",
        "orchestrator.algo.loss_aggregation: prompt": "algorithm.loss_aggregation=prompt_mean",
        "orchestrator.filters: [{type: zero_advantage}]": "buffer/filter=zero_advantage",
        "trainer.model.optim_cpu_offload: true": "learner.engine.offload_optimizer=true",
        "orchestrator.sampling.extra_body: {top_k: 20}": "generators.sampling.top_k=20",
    },
}
NEEDED = {"trl": "num_generations: 8\n", "openrlhf": "rollout.batch_size: 8\n", "prime-rl": "orchestrator.made.up: 1\n"}


@cases("trainer, given, ours", *((trainer, *case) for trainer, table in CASES.items() for case in table.items()))
def test_a_setting_of_another_trainer_becomes_ours(tmp_path: Path, trainer: str, given: str, ours: str) -> None:
    needed = NEEDED.get(trainer, "algorithm.gamma: 1.0\n")
    assert ours in imported(tmp_path, trainer, needed + given).overrides


@cases(
    "trainer, given, ours",
    ("trl", "optim: adamw_torch_fused", None),
    ("trl", "optim: paged_adamw_8bit", "adamw_8bit"),
    ("trl", "optim: lion_32bit", ""),
    ("verl", "actor_rollout_ref.actor.optim.optimizer: AdamW8bit", "adamw_8bit"),
    ("verl", "actor_rollout_ref.actor: {optim.optimizer: adam, fsdp_config.optimizer_offload: true}", None),
    ("verl", "actor_rollout_ref.actor: {optim.optimizer: dist_muon, fsdp_config.optimizer_offload: true}", "muon"),
    ("openrlhf", "actor.optim: muon", "muon"),
    ("prime-rl", "trainer.optim.type: muon", "muon"),
    ("prime-rl", "trainer.optim.type: sgd", ""),
)
def test_the_optimizer_of_another_trainer_becomes_ours(tmp_path: Path, trainer: str, given: str, ours: str | None):
    needed = NEEDED.get(trainer, "algorithm: {adv_estimator: grpo}\nactor_rollout_ref.rollout.n: 4\n")
    found = imported(tmp_path, trainer, needed + given)
    run = load([*found.overrides, "model.path=m", "generators.group_size=8"])
    assert run.learner.optimizer.name == (ours or "adamw")
    assert run.learner.engine.zero_stage == (0 if ours else 2 if "learner.num_ranks=1" in found.overrides else 3)
    assert any("there are adamw, adamw_8bit, muon; adamw stays" in note for note in found.notes) == (ours == "")
    assert any("zero_stage=0" in note for note in found.notes) == bool(ours)
    assert not [line for line in found.untranslated if "optim" in line]


def test_bounds_and_penalties_without_effect_are_left_out_and_a_bypass_with_weights_is_a_correction(tmp_path) -> None:
    lines = "actor_rollout_ref.actor: {policy_loss: {loss_mode: cispo}, clip_ratio_low: 10, clip_ratio_high: 0.28}\n"
    lines += "algorithm: {adv_estimator: remax, use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.0}}\n"
    run = load(imported(tmp_path, "verl", lines + "actor_rollout_ref.model.path: m").overrides)
    assert run.algorithm.policy_loss.clip_low is None  # type: ignore[attr-defined]
    assert (run.algorithm.kl.coef, run.algorithm.kl.apply_to) == (0, "loss")
    lines = "algorithm: {adv_estimator: rloo, rollout_correction: {bypass_mode: true, loss_type: reinforce, "
    lines += "rollout_is: sequence, rollout_is_threshold: 3.0, rollout_is_batch_normalize: true}}\n"
    lines += "actor_rollout_ref: {model: {path: m}, rollout: {n: 4, agent: {default_agent_loop: my_agent}}}"
    found = imported(tmp_path, "verl", lines)
    algorithm = load(found.overrides).algorithm
    assert (algorithm.policy_loss.kind, algorithm.correction.level) == ("reinforce", "sequence")
    assert (algorithm.correction.max_weight, algorithm.correction.normalize) == (3, True)
    assert algorithm.proximal != "generator"
    assert any("default_agent_loop=my_agent: write it as" in note for note in found.notes)


def test_tools_and_users_of_verl_become_those_of_an_agent(tmp_path: Path) -> None:
    tools = "tools:\n- class_name: my.tools.Search\n  config: {url: u}\n  tool_schema: {type: function}\n"
    (tmp_path / "tools.yaml").write_text(tools)
    (tmp_path / "users.yaml").write_text("interaction:\n- name: teacher\n  class_name: my.Teacher\n  config: {}\n")
    key = "actor_rollout_ref.rollout.multi_turn"
    lines = f"{key}.tool_config_path: {tmp_path}/tools.yaml\n{key}.max_assistant_turns: 5\n"
    lines += "algorithm.adv_estimator: grpo\nactor_rollout_ref: {model: {path: m}, rollout: {n: 4}}\n"
    agent = load(imported(tmp_path, "verl", lines).overrides).generators.agent
    assert (type(agent), agent.max_turns) == (ToolsAgentConfig, 5)  # type: ignore[union-attr]
    assert [(tool.function, tool.arguments) for tool in agent.tools] == [("my.tools:Search", {"url": "u"})]  # type: ignore[union-attr]
    lines += f"{key}.interaction_config_path: {tmp_path}/users.yaml\n"
    agent = load(imported(tmp_path, "verl", lines).overrides).generators.agent
    assert (type(agent), agent.interactions[0].name) == (InteractionAgentConfig, "teacher")  # type: ignore[union-attr]
    found = imported(tmp_path, "verl", f"{key}.tool_config_path: nosuch.yaml")
    assert any("nosuch.yaml" in note and "this file is not here" in note for note in found.notes)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_nothing_that_a_file_sets_is_dropped(tmp_path: Path, trainer: str) -> None:
    """Settings that are on, off, known, or unknown: each is noted, listed, or one of ours."""
    first = {"verl": "data.", "trl": "", "openrlhf": "", "prime-rl": "trainer."}[trainer]
    unknown = {f"{first}made_up": 3, f"{first}off": False, f"{first}zero": 0, f"{first}record.below": "x"}
    content = NEEDED.get(trainer, "") + "".join(f"{key}: {value}\n" for key, value in unknown.items())
    found = imported(tmp_path, trainer, content)
    listed = "\n".join([*found.untranslated, *found.decided])
    assert not [key for key in unknown if key not in listed], listed
    assert found.notes[0].startswith("the file names no model")


DEFAULTS = {
    "verl": {
        "learner.prompts_per_step": "1024",
        "algorithm.updates_per_step": "4",
        "algorithm.policy_loss.dual_clip": "3.0",
    },
    "trl": {"learner.epochs": "3", "generators.sampling.max_tokens": "512", "learner.optimizer.schedule": "linear"},
    "openrlhf": {
        "algorithm.kl.apply_to": "reward",
        "learner.optimizer.betas": "[0.9, 0.95]",
        "algorithm/advantage": "gae",
    },
    "prime-rl": {"staleness.max_lag": "8", "algorithm.policy_loss.clip_high": "0.2", "model.max_length": "2048"},
}


@pytest.mark.parametrize("trainer", DEFAULTS)
def test_missing_settings_have_the_defaults_of_the_trainer(tmp_path: Path, trainer: str) -> None:
    found = imported(tmp_path, trainer, NEEDED.get(trainer, "algorithm.gamma: 1.0\n"))
    ours = dict(override.split("=", 1) for override in found.overrides)
    assert {key: ours[key] for key in DEFAULTS[trainer]} == DEFAULTS[trainer]


@cases(
    "key, usual, other",
    ("actor_rollout_ref.actor.ppo_epochs", "1", "2"),
    ("data.shuffle", "true", "false"),
    ("data.truncation", "error", "left"),
)
def test_only_a_setting_that_differs_from_its_default_is_noted(tmp_path: Path, key: str, usual: str, other: str):
    plain, noted = (imported(tmp_path, "verl", f"{key}: {value}") for value in (usual, other))
    assert not [line for line in [*plain.notes, *plain.untranslated, *plain.decided] if key in line]
    assert [line for line in noted.notes if line.startswith(f"{key}=")]


def test_settings_that_need_no_equivalent_say_why_and_an_older_name_counts(tmp_path) -> None:
    lines = "trainer.balance_batch: true\ncritic.optim.lr: 1\nalgorithm.adv_estimator: grpo"
    found = imported(tmp_path, "verl", lines)
    assert found.untranslated == []
    reason = "microbatches are filled up to learner.tokens_per_microbatch and balanced over ranks"
    critic = "only algorithm/advantage=gae has a critic: critic.optim.lr=1"
    assert found.decided == [f"{reason}: trainer.balance_batch=true", critic]
    lines = "rollout.batch_size: 8\nrollout_batch_size: 8\nseed: 1\ntrain.seed: 2"
    found = imported(tmp_path, "openrlhf", lines)
    assert {"learner.prompts_per_step=8", "seed=2"} <= set(found.overrides)
    assert found.untranslated == ["seed = 1"]
    with pytest.raises(ConfigError, match="FILE must be YAML, TOML, JSON, or a shell script"):
        imported(tmp_path, "prime-rl", "a = [", name="rl.toml")


def names_of_ours(found: object) -> list[str]:
    if isinstance(found, dict | list):
        parts = found.values() if isinstance(found, dict) else found
        return [name for each in parts for name in names_of_ours(each)]
    return [found] if isinstance(found, str) else []


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_setting_that_a_table_names_exists(trainer: str) -> None:
    known = {setting.key for setting in settings()} | {group.replace("/", ".") for group in groups()}
    tables = TRAINERS[trainer].tables
    same = [row[0] if isinstance(row, list) else row for row in tables["same"].values()]
    names = ("critic", "distillation", "dppo", "gae", "lora", "losses", "sapo", "turns", "vespo")
    more = [tables.get(name, {}) for name in names]
    assert not [name for name in [*same, *names_of_ours(more)] if "." in name and name not in known]
    sentences = str([*tables["notes"].values(), *tables["decided"]])
    roots = "algorithm|buffer|data|evaluation|generators|learner|model|weights"
    named = re.findall(rf"(?<![/\w])(?:{roots})\.[a-z_.]+[a-z_]", sentences)
    assert len(named) > 3
    assert not [name for name in named if name not in known]


@pytest.mark.parametrize(("trainer", "title"), zip(TRAINERS, ("verl", "TRL", "prime-rl", "OpenRLHF"), strict=True))
def test_the_page_names_settings_that_the_importer_reads(trainer: str, title: str) -> None:
    section = text("docs/migration.md").split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`-{0,2}([\w.]+)`", cell)]
    assert len(named) > 10
    stem = trainer.replace("-", "_")
    sources = text(f"slipstream/migration/{stem}.yaml") + text(f"slipstream/migration/{stem}.py")
    assert not [name for name in named if not re.search(rf"\b{name.split('.')[-1]}\b", sources)]
