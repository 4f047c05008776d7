"""Settings that newcomers guess: names of other trainers and plain words lead to the setting meant, or to a reason."""

import re

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.schema import NO_SETTING, groups, peer_advice, peer_names, settings

GUESSES = """
num_generations                     generators.group_size
max_completion_length               generators.sampling.max_tokens
max_prompt_length                   data.max_prompt_tokens
per_device_train_batch_size         learner.prompts_per_step
per_device_eval_batch_size          | batch all open requests
gradient_accumulation_steps         learner.tokens_per_microbatch
learning_rate                       learner.optimizer.learning_rate
num_train_epochs                    learner.epochs
beta                                algorithm.kl.coef
epsilon_high                        algorithm.policy_loss.clip_high
loss_type                           algorithm.loss_aggregation
num_iterations                      buffer.reuse.max_uses
repetition_penalty                  | could not compute the probabilities
report_to                           logging.backends
save_steps                          learner.checkpoint.every_steps
eval_on_start                       evaluation.before_training
metric_for_best_model               learner.checkpoint.best
bf16                                model.dtype
fp16                                model.dtype
optim                               learner.optimizer.name
warmup_ratio                        learner.optimizer.warmup_steps
reward_funcs                        generators.reward.functions
model_name_or_path                  model.path
dataset_name                        data.train
use_peft                            model.lora.rank
lora_dropout                        | has dropout
load_in_4bit                        | no quantized weights
max_tool_calling_iterations         generators.agent.max_turns
logging_steps                       | every step is logged
push_to_hub                         | hf upload
attn_implementation                 | follow from the device
shuffle_dataset                     | that `seed` decides
torch_compile                       learner.compile
output_dir                          runs_dir
data.train_files                    data.train
data.val_files                      data.eval
data.train_batch_size               learner.prompts_per_step
data.val_batch_size                 | batch all open requests
data.image_key                      data.columns
data.shuffle                        | that `seed` decides
data.truncation                     data.on_too_long
actor_rollout_ref.model.path        model.path
actor_rollout_ref.actor.optim.lr    learner.optimizer.learning_rate
actor_rollout_ref.actor.ppo_mini_batch_size      algorithm.updates_per_step
actor_rollout_ref.actor.use_dynamic_bsz          learner.tokens_per_microbatch
actor_rollout_ref.actor.clip_ratio_high          algorithm.policy_loss.clip_high
actor_rollout_ref.actor.loss_agg_mode            algorithm.loss_aggregation
actor_rollout_ref.actor.fsdp_config.param_offload      learner.engine.offload_parameters
actor_rollout_ref.actor.fsdp_config.optimizer_offload  learner.engine.offload_optimizer
actor_rollout_ref.actor.strategy                 learner/engine
actor_rollout_ref.model.use_remove_padding       learner.packing
actor_rollout_ref.rollout.n                      generators.group_size
actor_rollout_ref.rollout.val_kwargs.n           data.eval
actor_rollout_ref.rollout.multi_turn.enable      generators/agent
actor_rollout_ref.rollout.multi_turn.tool_config_path      generators.agent.tools
actor_rollout_ref.rollout.multi_turn.max_assistant_turns   generators.agent.max_turns
actor_rollout_ref.rollout.agent.num_workers      generators.max_concurrency
actor_rollout_ref.rollout.free_cache_engine      | put to sleep
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu  | balanced over ranks
critic.model.path                   algorithm.critic.path
reward_model.model.path             generators.reward.function
custom_reward_function.path         generators.reward.function
algorithm.adv_estimator             algorithm/advantage
algorithm.kl_ctrl.type              algorithm.kl.adaptive
algorithm.filter_groups.enable      buffer/filter
algorithm.rollout_correction.rollout_is          algorithm/correction
trainer.total_epochs                learner.epochs
trainer.nnodes                      cluster.learner.machines
trainer.default_local_dir           runs_dir
trainer.resume_mode                 resume
trainer.val_only                    mode
trainer.rollout_data_dir            | runs/NAME/archive
async_training.staleness_threshold  staleness.max_lag
async_training.trigger_parameter_sync_step       weights.publish_every_steps
async_training.partial_rollout      | every token keeps its version
max_async_level                     staleness.max_lag
rollouts_per_example                generators.group_size
ckpt.keep_last                      learner.checkpoint.keep
ckpt.resume_step                    resume
optim.type                          learner.optimizer.name
model.name                          model.path
env.id                              generators.agent.environment
eval.interval                       evaluation.every_steps
inference.parallel.tp               generators.engine.tensor_parallel_size
num_infer_gpus                      generators.count
weight_broadcast.type               weights.transport
scheduler.min_lr                    | decays to 0
pretrain                            model.path
reward_pretrain                     generators.reward.function
micro_train_batch_size              learner.tokens_per_microbatch
n_samples_per_prompt                generators.group_size
init_kl_coef                        algorithm.kl.coef
adam_offload                        learner.engine.offload_optimizer
eps_clip_low_high                   algorithm.policy_loss.clip_low
async_queue_size                    staleness.max_lag
actor_num_gpus_per_node             learner.num_ranks
vllm_is_truncated_threshold         algorithm.correction.max_weight
agent_func_path                     generators.agent.function
colocate_all_models                 | put to sleep
normalize_reward                    algorithm.reward.normalize
gconfig.n_samples                   generators.group_size
rollout.max_head_offpolicyness      staleness.max_lag
rollout.consumer_batch_size         learner.prompts_per_step
actor.optimizer.gradient_clipping   learner.optimizer.max_grad_norm
actor.ppo_n_minibatches             algorithm.updates_per_step
actor.reward_scaling                | in your function
actor.mb_spec.max_tokens_per_mb     learner.tokens_per_microbatch
saver.freq_steps                    learner.checkpoint.every_steps
cluster.n_nodes                     cluster.learner.machines
recover.mode                        resume
grpo.num_prompts_per_step           learner.prompts_per_step
grpo.num_generations_per_prompt     generators.group_size
grpo.val_period                     evaluation.every_steps
grpo.use_leave_one_out_baseline     algorithm/advantage
grpo.async_grpo.max_trajectory_age_steps         staleness.max_lag
loss_fn.reference_policy_kl_penalty algorithm.kl.coef
loss_fn.ratio_clip_max              algorithm.policy_loss.clip_high
policy.max_total_sequence_length    model.max_length
policy.precision                    model.dtype
policy.tokenizer.name               | that of model.path
policy.generation.colocated.enabled | put to sleep
policy.dtensor_cfg.activation_checkpointing      learner.engine.gradient_checkpointing
policy.sequence_packing.enabled     learner.packing
checkpointing.save_period           learner.checkpoint.every_steps
data.system_prompt_file             | role system
--hf-checkpoint                     model.path
--rollout-shuffle                   | that `seed` decides
--num-rollout                       learner.max_steps
--num-steps-per-rollout             algorithm.updates_per_step
--eval-interval                     evaluation.every_steps
--eval-prompt-data                  data.eval
--input-key                         data.columns
--rollout-max-response-len          generators.sampling.max_tokens
--rollout-num-gpus-per-engine       generators.engine.tensor_parallel_size
--sglang-mem-fraction-static        generators.engine.gpu_memory_utilization
--clip-grad                         learner.optimizer.max_grad_norm
--tis-clip                          algorithm.correction.max_weight
--partial-rollout                   | every token keeps its version
--use-fault-tolerance               | always restarted
--custom-generate-function-path     generators.agent.function
--update-weights-interval           weights.publish_every_steps
lr                                  learner.optimizer.learning_rate
batch_size                          learner.prompts_per_step
mini_batch_size                     algorithm.updates_per_step
epochs                              learner.epochs
steps                               learner.max_steps
max_steps                           learner.max_steps
num_gpus                            learner.num_ranks
tp                                  generators.engine.tensor_parallel_size
num_nodes                           cluster.learner.machines
num_generators                      generators.count
generators.num                      generators.count
shuffle                             | that `seed` decides
system_prompt                       | role system
data.split                          | into a file
min_lr                              | decays to 0
wandb_project                       logging.backends
wandb                               logging.backends
tags                                logging.backends
dataset                             data.train
train_file                          data.train
data.path                           data.train
data.train_path                     data.train
data.eval_path                      data.eval
val_file                            data.eval
test_size                           data.eval
model_name                          model.path
tokenizer                           | that of model.path
hf_token                            | HF_TOKEN
precision                           model.dtype
context_length                      model.max_length
max_new_tokens                      generators.sampling.max_tokens
temperature                         generators.sampling.temperature
group_size                          generators.group_size
num_samples                         generators.group_size
reward                              generators.reward.function
tools                               generators.agent.tools
enable_thinking                     model.chat_template_kwargs
lora.r                              model.lora.rank
kl                                  algorithm.kl.coef
clip_range                          algorithm.policy_loss.clip_high
algorithm.clip_high                 algorithm.policy_loss.clip_high
algo                                recipe
loss                                algorithm/policy_loss
critic                              algorithm.critic.path
optimizer                           learner.optimizer.name
grad_clip                           learner.optimizer.max_grad_norm
dropout                             | has dropout
flash_attention                     | follow from the device
buffer_size                         | pacing (staleness.max_lag) bounds
redis_url                           buffer.store.url
dynamic_sampling                    buffer/filter
save_every                          learner.checkpoint.every_steps
eval_every                          evaluation.every_steps
log_interval                        | every step is logged
log_level                           | logs/ROLE.log
dry_run                             | slipstream diagnose
early_stopping                      evaluation.stop
resume_from                         | slipstream resume NAME
config                              experiment
names                               name
experyment                          experiment
learner.learning_rate               learner.optimizer.learning_rate
learner.max_step                    learner.max_steps
learner.optimizr.learning_rate      learner.optimizer.learning_rate
buffer.samplr                       buffer/sampler
buffer/storr                        buffer/store
algorithm/entropy_coef              algorithm.entropy_coef
"""


@pytest.mark.parametrize("row", GUESSES.strip().splitlines(), ids=lambda row: row.split()[0])
def test_a_guessed_setting_is_answered_with_the_one_meant_or_the_reason(row, answer_to, monkeypatch):
    guess, _, expected = re.split(r" +(\| )?", row, maxsplit=1)
    # Before anything of the default run is made.
    monkeypatch.setattr("slipstream.launch.run.prepare", None)
    monkeypatch.setattr("slipstream.launch.run.check_surroundings", None)
    answer = answer_to("run", *([guess, "1"] if guess.startswith("--") else [f"{guess}=1"]))
    assert guess in answer
    if "|" in row:
        assert expected in answer
    else:
        (found,) = re.findall(r"(?:here it is|did you mean|: write) ([\w./]+?)(?:=1)?[.?]$", answer) or [answer]
        assert found == expected


def test_every_name_of_another_trainer_leads_to_a_setting_that_exists() -> None:
    known = {setting.key for setting in settings() if setting.takes_value or setting.records} | set(groups())
    for name, (trainer, ours) in peer_names().items():
        advice = f"{name} is the name in {trainer}; here it is {ours}"
        for guess in (f"actor.{name}", name.replace("_", "-")):
            assert peer_advice(guess) == (ours if trainer == NO_SETTING else advice)
        named = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+(?=[ ,;]|$)", ours) if trainer == NO_SETTING else [ours]
        assert set(named) <= known, name


@pytest.mark.parametrize("key", ["stat", "buffer.rewards", "evaluation_strategies"])
def test_only_keys_that_can_be_set_are_suggested(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load([f"{key}=1"])
    assert "did you mean" not in str(refused.value), "neither records nor entries of lists"
