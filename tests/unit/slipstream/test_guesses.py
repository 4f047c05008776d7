"""Settings that newcomers guess: names of other trainers and plain words lead to the setting meant, or to a reason."""

import re

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.schema import NO_SETTING, groups, peer_advice, peer_names, settings

GUESSES = """
algorithm.correction.max_weight: vllm_is_truncated_threshold --tis-clip
algorithm.critic.path: critic.model.path critic
algorithm.entropy_coef: algorithm/entropy_coef
algorithm.kl.adaptive: algorithm.kl_ctrl.type
algorithm.kl.coef: beta init_kl_coef loss_fn.reference_policy_kl_penalty kl
algorithm.loss_aggregation: loss_type actor_rollout_ref.actor.loss_agg_mode
algorithm.policy_loss.clip_high: epsilon_high actor_rollout_ref.actor.clip_ratio_high loss_fn.ratio_clip_max
    clip_range algorithm.clip_high
algorithm.policy_loss.clip_low: eps_clip_low_high
algorithm.reward.normalize: normalize_reward
algorithm.updates_per_step: actor_rollout_ref.actor.ppo_mini_batch_size actor.ppo_n_minibatches
    --num-steps-per-rollout mini_batch_size
algorithm/advantage: algorithm.adv_estimator grpo.use_leave_one_out_baseline
algorithm/correction: algorithm.rollout_correction.rollout_is
algorithm/policy_loss: loss
buffer.reuse.max_uses: num_iterations
buffer.store.url: redis_url
buffer/filter: algorithm.filter_groups.enable dynamic_sampling
buffer/sampler: buffer.samplr
buffer/store: buffer/storr
cluster.learner.machines: trainer.nnodes cluster.n_nodes num_nodes
data.columns: data.image_key --input-key
data.eval: data.val_files actor_rollout_ref.rollout.val_kwargs.n --eval-prompt-data data.eval_path val_file test_size
data.max_prompt_tokens: max_prompt_length
data.on_too_long: data.truncation
data.train: dataset_name data.train_files dataset train_file data.path data.train_path
evaluation.before_training: eval_on_start
evaluation.every_steps: eval.interval grpo.val_period --eval-interval eval_every
evaluation.stop: early_stopping
experiment: config experyment
generators.agent.environment: env.id
generators.agent.function: agent_func_path --custom-generate-function-path
generators.agent.max_turns: max_tool_calling_iterations actor_rollout_ref.rollout.multi_turn.max_assistant_turns
generators.agent.tools: actor_rollout_ref.rollout.multi_turn.tool_config_path tools
generators.count: num_infer_gpus num_generators generators.num
generators.engine.gpu_memory_utilization: --sglang-mem-fraction-static
generators.engine.tensor_parallel_size: inference.parallel.tp --rollout-num-gpus-per-engine tp
generators.group_size: num_generations actor_rollout_ref.rollout.n rollouts_per_example n_samples_per_prompt
    gconfig.n_samples grpo.num_generations_per_prompt group_size num_samples
generators.max_concurrency: actor_rollout_ref.rollout.agent.num_workers
generators.reward.function: reward_model.model.path custom_reward_function.path reward_pretrain reward
generators.reward.functions: reward_funcs
generators.sampling.max_tokens: max_completion_length --rollout-max-response-len max_new_tokens
generators.sampling.temperature: temperature
generators/agent: actor_rollout_ref.rollout.multi_turn.enable
learner.checkpoint.best: metric_for_best_model
learner.checkpoint.every_steps: save_steps saver.freq_steps checkpointing.save_period save_every
learner.checkpoint.keep: ckpt.keep_last
learner.compile: torch_compile
learner.engine.gradient_checkpointing: policy.dtensor_cfg.activation_checkpointing
learner.engine.offload_optimizer: actor_rollout_ref.actor.fsdp_config.optimizer_offload adam_offload
learner.engine.offload_parameters: actor_rollout_ref.actor.fsdp_config.param_offload
learner.epochs: num_train_epochs trainer.total_epochs epochs
learner.max_steps: --num-rollout steps max_steps learner.max_step
learner.num_ranks: actor_num_gpus_per_node num_gpus
learner.optimizer.learning_rate: learning_rate actor_rollout_ref.actor.optim.lr lr learner.learning_rate
    learner.optimizr.learning_rate
learner.optimizer.max_grad_norm: actor.optimizer.gradient_clipping --clip-grad grad_clip
learner.optimizer.name: optim optim.type optimizer
learner.optimizer.warmup_steps: warmup_ratio
learner.packing: actor_rollout_ref.model.use_remove_padding policy.sequence_packing.enabled
learner.prompts_per_step: per_device_train_batch_size data.train_batch_size rollout.consumer_batch_size
    grpo.num_prompts_per_step batch_size
learner.tokens_per_microbatch: gradient_accumulation_steps actor_rollout_ref.actor.use_dynamic_bsz
    micro_train_batch_size actor.mb_spec.max_tokens_per_mb
learner/engine: actor_rollout_ref.actor.strategy
logging.backends: report_to wandb_project wandb tags
mode: trainer.val_only
model.chat_template_kwargs: enable_thinking
model.dtype: bf16 fp16 policy.precision precision
model.lora.rank: use_peft lora.r
model.max_length: policy.max_total_sequence_length context_length
model.path: model_name_or_path actor_rollout_ref.model.path model.name pretrain --hf-checkpoint model_name
name: names
recipe: algo
resume: trainer.resume_mode ckpt.resume_step recover.mode
runs_dir: output_dir trainer.default_local_dir
staleness.max_lag: async_training.staleness_threshold max_async_level async_queue_size rollout.max_head_offpolicyness
    grpo.async_grpo.max_trajectory_age_steps
weights.publish_every_steps: async_training.trigger_parameter_sync_step --update-weights-interval
weights.transport: weight_broadcast.type
| HF_TOKEN: hf_token
| always restarted: --use-fault-tolerance
| balanced over ranks: actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
| batch all open requests: per_device_eval_batch_size data.val_batch_size
| could not compute the probabilities: repetition_penalty
| decays to 0: scheduler.min_lr min_lr
| every step is logged: logging_steps log_interval
| every token keeps its version: async_training.partial_rollout --partial-rollout
| follow from the device: attn_implementation flash_attention
| has dropout: lora_dropout dropout
| hf upload: push_to_hub
| in your function: actor.reward_scaling
| into a file: data.split
| logs/ROLE.log: log_level
| no quantized weights: load_in_4bit
| pacing (staleness.max_lag) bounds: buffer_size
| put to sleep: actor_rollout_ref.rollout.free_cache_engine colocate_all_models policy.generation.colocated.enabled
| role system: data.system_prompt_file system_prompt
| runs/NAME/archive: trainer.rollout_data_dir
| slipstream diagnose: dry_run
| slipstream resume NAME: resume_from
| that `seed` decides: shuffle_dataset data.shuffle --rollout-shuffle shuffle
| that of model.path: policy.tokenizer.name tokenizer
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
