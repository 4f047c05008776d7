"""Mistakes of newcomers: each gets one sentence that says what to correct, before anything starts."""

import json
import re
import shutil
from pathlib import Path

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.schema import NO_SETTING, groups, peer_advice, peer_names, settings
from tests.tiny_model import make_tiny_model

ANSWERED = '"answer": "2"}\n'
ASKED = '{"prompt": [{"role": "user", "content": "1+1="}'
FILES = {
    "train.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n',
    "heldout.jsonl": '{"prompt": "2+2=", "answer": "4"}\n',
    "messages.jsonl": f"{ASKED}], {ANSWERED}",
    "answered.jsonl": f'{ASKED}, {{"role": "assistant", "content": "2"}}], {ANSWERED}',
    "long.jsonl": '{"prompt": "2+2=", "answer": "4"}\n{"prompt": "1+1+1+1+1+1+1+1+1=", "answer": "9"}\n',
    "fake.parquet": "no parquet",
    "notes.txt": "no rows\n",
    "no_prompt.jsonl": '{"text_in": "1+1=", ' + ANSWERED,
    "no_answer.jsonl": '{"prompt": "1+1="}\n',
    "mine.yaml": "learner: {max_step: 3}\n",
    "broken.yaml": "a: [\n",
    "imports.py": "import nosuch\ndef score(sample): return 1\n",
    "rewards.py": """\
def score(sample): return {"score": 1}
def total(sample): return {"total": 0.5}
def raises(sample): raise ValueError("boom")
def text(sample): return "1.0"
def assumes(sample): return 1.0 if int(sample.response) == 2 else 0.0
def attribute(sample): return float(sample.completion == "2")
def missing(completions, answers): return [1.0 for _ in completions]
def alone(): return 1.0
""",
}
TASK = ("model.path=model", "data.train=train.jsonl", "data.eval=heldout.jsonl")
TASK += ("generators.reward.function=exact_match", "data.max_prompt_tokens=16", "generators.sampling.max_tokens=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("newcomer")
    make_tiny_model(made / "model")
    for name, content in FILES.items():
        (made / name).write_text(content)
    (made / "adapter").mkdir()
    (made / "adapter" / "adapter_config.json").write_text("{}")
    for name, left_out in (("untokenized", "tokenizer*"), ("unweighted", "*.safetensors"), ("wide", "config.json")):
        shutil.copytree(made / "model", made / name, ignore=shutil.ignore_patterns(left_out))
    config = json.loads((made / "model" / "config.json").read_text())
    (made / "wide" / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    return made


RUNS = """
learner.max_steps=0                         learner.max_steps must be an integer >= 1, got 0.
generators.group_size=1                     must be >= 2 for algorithm/advantage=grpo, got 1
learner.optimizer.learning_rate=0           learner.optimizer.learning_rate must be a number > 0.0, got 0.
learner.optimizer.name=adam                 must be one of adamw, adamw_8bit, muon, got 'adam'.
generators.sampling.top_p=1.5               generators.sampling.top_p must be a number <= 1.0, got 1.5.
generators.sampling.stop=END                must be a list, got 'END'. Write generators.sampling.stop=[END].
generators.count=-1                         generators.count must be an integer >= 0, got -1.
model.lora=true                             must be a record or null, got True. Set its fields, such as model.lora.rank.
model.max_length=8                          must be >= data.max_prompt_tokens + generators.sampling.max_tokens (32)
evaluation.stop=0.9                         evaluation.stop must be a list or null, got 0.9.
"evaluation.stop=[{metric: accuracy, at_least: 0.9}]"  such as eval/accuracy_sampled, got accuracy
learner.checkpoint.best.metric=accuracy     learner.checkpoint.best must be one value, got a record with metric
mode=sync                                   mode must be one of async, evaluate, replay, serial, sft, got 'sync'.
"name='my run'"                             name must be 1 to 80 letters, digits, ., _ and -
logging.backends=wandb                      must be a record or a list, got 'wandb'. Write logging.backends=[wandb].
logging.backends=[wanb]                     must name trackio, wandb, tensorboard or a class as module:Class
broker.address=localhost:5555               broker.address must be a loopback or ipc endpoint (like tcp://127.0.0.1:5757
prepare=[make.py]                           prepare[0] must be a record, got 'make.py'.
generators=2                                must be set by its fields, got `generators=2`: generators has count,
experiment=gsm8k                            did you mean experiment=gsm8k_1gpu or
experiment=nosuch.yaml                      experiment=nosuch.yaml must be a readable YAML file
mine.yaml                                   unknown key learner.max_step; did you mean learner.max_steps?
broken.yaml                                 experiment=broken.yaml must be a readable YAML file: while parsing
recipe=GRPO                                 unknown option recipe=GRPO; did you mean recipe=grpo?
model=Qwen/Qwen3-0.6B                       a folder or hub name is set as model.path=Qwen/Qwen3-0.6B.
algorithm/policy_loss=ppo                   did you mean algorithm/policy_loss=ppo_clip?
algorithm.advantage=rloo                    write algorithm/advantage=rloo.
"buffer/store=redis buffer.store.url=localhost:6379"  must be a redis://, rediss:// or unix:// address
"learner.prompts_per_step=4 algorithm.updates_per_step=8"  must be a multiple of algorithm.updates_per_step (8), got 4
"generators.autoscale.min=3 generators.autoscale.max=1"  must lie between generators.autoscale.min and max (3 to 1)
"data.curriculum.low=0.9 data.curriculum.high=0.1"  data.curriculum.low must be < high (0.1), got 0.9
learner.sequence_parallel=2                 learner.num_ranks must be a multiple of learner.sequence_parallel (2), got 1
learner.device=cuda                         learner.device=cuda must have an NVIDIA GPU
algorithm.distillation.coef=1               algorithm.distillation.teacher_path must be set, got nothing.
mode=replay                                 replay.path must be set with mode=replay and only then
mode=sft                                    sft.train_path must be set with mode=sft and only then
mode=serial                                 weights.transport must be memory with mode=serial, got collective
"name=nosuch resume=true"                   but there is no runs/nosuch
runs_dir=/proc/x                            must be a path where a folder can be made: choose another runs_dir.
runs_dir=train.jsonl                        train.jsonl/run must be a path that this user may read and write
data.train=nosuch.jsonl                     nosuch.jsonl must be a file of prompts (Parquet, or by its extension CSV
data.train=openai/gsm8k                     but there is no such file: a dataset of the hub must be downloaded as files.
data.train=[train.jsonl,nosuch.jsonl]       nosuch.jsonl must be a file of prompts
data.train=                                 data.train must name files of prompts, got nothing
data.train=[]                               data.train must name a file, got an empty list
data.train=.                                . must be a file of prompts
data.train=fake.parquet                     fake.parquet must be Parquet
data.train=notes.txt                        notes.txt must be Parquet, or by its extension CSV (.csv) or JSON (.jsonl
data.train=no_prompt.jsonl                  got only text_in, answer: name the column of your file with data.columns
data.train=answered.jsonl                   got the model's own turn at the end: '2'; remove that message.
data.train=no_answer.jsonl                  got only prompt: name the column of your file with data.columns.ground
data.columns.prompt=question                `question` must be filled, got only prompt, answer
"data.columns={question: prompt}"           data.columns must name columns for prompt, ground_truth
data.eval=                                  data.eval must name files of prompts, got nothing
"data.eval=[{path: heldout.jsonl}]"         data.eval[0].name must be set, got nothing.
data.eval=train.jsonl                       must hold prompts that are not trained on, got train.jsonl, the same file
model.path=./nosuch/model                   got './nosuch/model': there is no such folder.
model.path=.                                got '.': the folder has no config.json.
model.path=adapter                          got 'adapter': the folder has no config.json.
model.path=untokenized                      no tokenizer (tokenizer.json)
model.path=unweighted                       no weights (model.safetensors)
model.path=wide                             token 40 of its tokenizer has no embedding
model.lora.targets=[w_proj]                 model.lora.targets must name layers of the model, got w_proj: this
"model.lora.targets=[q_proj,lm_head]"       must name linear layers other than the head, embeddings, and experts
"algorithm.distillation={teacher_path: ./nosuch}"   algorithm.distillation.teacher_path must be a folder with a
"algorithm/advantage=gae algorithm.critic.path=./nosuch"  algorithm.critic.path must be a folder with a transformers
"data.max_prompt_tokens=3 data.on_too_long=skip"  but 2 of 2 are longer, up to 4 tokens in row 0: raise the limit
data.eval=long.jsonl                        the prompts of long.jsonl must hold at most data.max_prompt_tokens (16)
model.chat_template=nosuch.jinja            model.chat_template must be a file with a Jinja template, got 'nosuch.jinja'
generators.reward.function=exactmatch       Did you mean 'exact_match'?
generators.reward.function=rewards.py       must look like `module:function` or be one of exact_match
generators.reward.function=nosuch:score     got 'nosuch:score': there is no module 'nosuch'.
generators.reward.function=imports.py:score got 'imports.py:score': there is no module 'nosuch'.
generators.reward.function=rewards.py:alone must fit 'rewards.py:alone', got {}: too many positional arguments.
generators.reward.functions=[exact_match]   generators.reward.functions[0] must be a record, got 'exact_match'.
generators.reward.function=rewards.py:raises   boom, at {folder}/rewards.py:3: `def raises(sample): raise
generators.reward.function=rewards.py:text  must be a Reward, a number, or a dict with `total`
generators.reward.function=rewards.py:assumes  invalid literal for int() with base 10: 'I do not know.'
generators.reward.function=rewards.py:attribute  'RewardInput' object has no attribute 'completion'
generators.reward.function=rewards.py:missing  missing 1 required positional argument: 'answers'
generators.reward.function=rewards.py:score
generators.reward.function=rewards.py:total
data.train=messages.jsonl
"""

COMMANDS = """
"--learner.max_steps=5"                     got `--learner.max_steps=5`: write learner.max_steps=5.
"run --learner.max_steps 5"                 write learner.max_steps=5.
"run --max-steps=5"                         write learner.max_steps=5.
"max_steps 5"                               write learner.max_steps=5.
"run max_steps 5"                           write learner.max_steps=5.
"run xyzzy"                                 key=value, got `xyzzy`
"xyzzy"                                     no command `xyzzy`; there are: run,
"status --jso"                              --jso
"status --json --watch"                     --json prints once
"status learner.max_steps=3"                got 'learner.max_steps=3'
"explain steps 3"                           'steps'
"explain"                                   'KIND'
"explain step"                              step must be followed by its number, `slipstream explain step 12`, got ''.
"explain step three"                        `slipstream explain step 12`, got 'three'
"data lst"                                  lst
"resume"                                    the name of a run, such as `slipstream resume mine`, got none.
"run --resume"                              write `slipstream resume NAME`, or `slipstream run name=NAME resume=true`
"run resume mine"                           got `resume`: write `slipstream resume mine`, or
"run resume=mine learner.max_steps=3"       got `resume=mine`: write `slipstream resume mine`, or
"resume=runs/mine/"                         got `resume=runs/mine/`: write `slipstream resume mine`, or
"run resume_from_checkpoint=runs/mine/checkpoints/step-00000002"   write `slipstream resume mine`, or
"run --continue mine"                       got `--continue`: write `slipstream resume mine`, or
"resume nosuch"                             but there is no runs/nosuch
"status"                                    there must be a run in runs/, got none: start one with `slipstream run`.
"status nosuch"                             runs/nosuch must be a run folder, but has no config.yaml
"watch nosuch"                              runs/nosuch must be a run folder
"explain speed"                             'speed' is not one of 'start', 'slow', 'reward', 'health', 'step', 'version'
"explain slow"                              there must be a run in runs/, got none
"scale 2"                                   scale needs generators=N once
"scale generators=-1"                       scale needs generators=N once
"scale generators=two"                      scale needs generators=N once
"scale generators=1 generators=2"           scale needs generators=N once
"drain"                                     missing argument 'GENERATOR'
"profile --steps 0"                         '--steps': Input should be greater than or equal to 1
"view train.jsonl"                          slipstream view must run in a terminal
"data ls nosuch"                            got 'nosuch': there is no such run, folder or file.
"evaluate"                                  MODEL must be a folder in transformers format or a name on the hub
"evaluate model"                            data.eval must name files of prompts, got nothing
"evaluate model data.eval=nosuch.jsonl"     nosuch.jsonl must be a file of prompts
"evaluate --responses heldout.jsonl"        name the column of your file with data.columns.response=NAME.
"generate model"                            missing option '--out'
"generate model --out a"                    data.train must name files of prompts, got nothing
"generate model other --out a data.train=train.jsonl"  generate must have one model, got model, other.
"convert nosuch out"                        SOURCE must be a folder with a checkpoint of a run, a model or adapter
"plan model.path=./nosuch"                  got './nosuch': there is no such folder.
"plan --gpus many"                          '--gpus': Input should be a valid integer
"sft sft.train_path=train.jsonl model.path=./nosuch"  got './nosuch': there is no such folder.
"sft sft.train_path=nosuch.jsonl model.path=model model.max_length=32"  nosuch.jsonl must be a file of demonstrations
"sft sft.train_path=train.jsonl sft.eval_path=nosuch.jsonl model.path=model model.max_length=32"  nosuch.jsonl must
"check loss nosuch:f"                       'loss' is not one of 'advantage', 'policy_loss'
"check advantage nosuch:f"                  there is no module 'nosuch'.
"import-config verl nosuch.sh"              FILE must exist, got nosuch.sh.
"import-config sglang train.jsonl"          'sglang' is not one of 'verl', 'trl', 'prime-rl', 'openrlhf'
"launch slurm"                              cluster.interface must name the network that the machines share
"launch kubernetes model.path=model"        missing option '--image'
"run model"                                 got `model`: write model.path=model.
"run train.jsonl"                           got `train.jsonl`: write data.train=train.jsonl.
"run --model.path model"                    got `--model.path`: write model.path=model.
"run -m seed=1"                             a sweep must have a setting with several values, such as seed=1,2,3.
"config --source"                           got `--source`.
"""


def rows(table: str) -> list[tuple[str, str]]:
    """(words, answer) of each row; several words are in quotes."""
    split = (line.lstrip('"').partition('"' if line.startswith('"') else " ") for line in table.strip().splitlines())
    return [(words, answer.strip()) for words, _, answer in split]


@pytest.mark.parametrize(("words", "answer"), rows(RUNS))
def test_a_mistake_in_a_run_is_answered_before_it_starts(words, answer, folder, tmp_path, answer_to, monkeypatch):
    monkeypatch.chdir(folder)
    runs_dir = [] if "runs_dir" in words or "resume" in words else [f"runs_dir={tmp_path}"]
    found = answer_to("run", *TASK, *runs_dir, *([words] if "{" in words or "'" in words else words.split()))
    assert answer.replace("{folder}", str(folder)) in found
    assert bool(answer) == bool(found)


@pytest.mark.parametrize(("words", "answer"), rows(COMMANDS))
def test_a_mistaken_command_is_answered(words, answer, folder, answer_to, monkeypatch):
    monkeypatch.chdir(folder)
    assert answer in answer_to(*words.split())


GUESSES = """
algorithm.correction.max_weight: vllm_is_truncated_threshold --tis-clip
algorithm.entropy_coef: algorithm/entropy_coef
algorithm.kl.coef: beta loss_fn.reference_policy_kl_penalty kl
algorithm.policy_loss.clip_high: actor_rollout_ref.actor.clip_ratio_high algorithm.clip_high
algorithm.updates_per_step: actor_rollout_ref.actor.ppo_mini_batch_size --num-steps-per-rollout mini_batch_size
algorithm/advantage: algorithm.adv_estimator grpo.use_leave_one_out_baseline
buffer/store: buffer/storr
data.eval: data.val_files actor_rollout_ref.rollout.val_kwargs.n --eval-prompt-data data.eval_path test_size
data.train: dataset_name data.train_files dataset data.path
evaluation.every_steps: eval.interval --eval-interval eval_every
experiment: config experyment
generators.count: num_infer_gpus generators.num
generators.group_size: num_generations actor_rollout_ref.rollout.n rollouts_per_example group_size
generators.reward.function: reward_model.model.path custom_reward_function.path reward
learner.checkpoint.every_steps: save_steps checkpointing.save_period
learner.max_steps: --num-rollout steps max_steps learner.max_step
learner.num_ranks: actor_num_gpus_per_node num_gpus
learner.optimizer.learning_rate: learning_rate actor_rollout_ref.actor.optim.lr lr learner.learning_rate
    learner.optimizr.learning_rate
learner.prompts_per_step: per_device_train_batch_size data.train_batch_size rollout.consumer_batch_size batch_size
learner/engine: actor_rollout_ref.actor.strategy
logging.backends: report_to wandb tags
model.path: model_name_or_path actor_rollout_ref.model.path model.name --hf-checkpoint
name: names
staleness.max_lag: async_training.staleness_threshold max_async_level rollout.max_head_offpolicyness
| HF_TOKEN: hf_token
| balanced over ranks: actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
| every token keeps its version: async_training.partial_rollout --partial-rollout
| slipstream resume NAME: resume_from
"""
"""`| REASON` or the setting meant, and the guesses that lead to it."""
CASES = [
    (guess, expected)
    for expected, guesses in re.findall(r"^(\S.*?):((?: +\S+(?:\n(?= ))?)+)", GUESSES, re.MULTILINE)
    for guess in guesses.split()
]


@pytest.mark.parametrize(("guess", "expected"), CASES)
def test_a_guessed_setting_is_answered_with_the_one_meant_or_the_reason(guess, expected, answer_to, monkeypatch):
    # Before anything of the default run is made.
    monkeypatch.setattr("slipstream.launch.run.prepare", None)
    monkeypatch.setattr("slipstream.launch.run.check_surroundings", None)
    answer = answer_to("run", *([guess, "1"] if guess.startswith("--") else [f"{guess}=1"]))
    assert guess in answer
    if expected.startswith("| "):
        assert expected.removeprefix("| ") in answer
    else:
        (found,) = re.findall(r"(?:here it is|did you mean|: write) ([\w./]+?)(?:=1)?[.?]$", answer) or [answer]
        assert found == expected


def test_every_name_of_another_trainer_leads_to_a_setting_and_only_keys_that_can_be_set_are_suggested() -> None:
    known = {setting.key for setting in settings() if setting.takes_value or setting.records} | set(groups())
    for name, (trainer, ours) in peer_names().items():
        advice = f"{name} is the name in {trainer}; here it is {ours}"
        for guess in (f"actor.{name}", name.replace("_", "-")):
            assert peer_advice(guess) == (ours if trainer == NO_SETTING else advice)
        named = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+(?=[ ,;]|$)", ours) if trainer == NO_SETTING else [ours]
        assert set(named) <= known, name
    for key in ("stat", "buffer.rewards", "evaluation_strategies"):
        with pytest.raises(ConfigError) as refused:
            load([f"{key}=1"])
        assert "did you mean" not in str(refused.value), "neither records nor entries of lists"
