"""Translate dependent settings of prime-rl: `rl.toml`, or trainer, orchestrator, and inference."""

from typing import Any

from slipstream.migration.translation import Trainer, Translation

_SAMPLING, _LOSS = "orchestrator.train.sampling", "trainer.loss"
_NEW = {f"orchestrator.{name}": f"orchestrator.train.{name}" for name in ("group_size", "algo.type")}
"""Settings that only versions with a batch size in tasks have."""


def _lengths(config: Translation) -> None:
    both, packed = config.take("seq_len"), config.take("trainer.model.seq_len")
    length = config.given.get("orchestrator.seq_len") or both or packed or config.take("orchestrator.seq_len")
    config.take("orchestrator.seq_len")
    answer = config.take(f"{_SAMPLING}.max_completion_tokens")
    if answer is None:
        answer = length // 2
        config.notes.append(f"prime-rl gives prompt and answer {length} tokens together; here each has half of them.")
    config.put("model.max_length", length)
    config.put("data.max_prompt_tokens", max(1, length - answer))
    config.put("generators.sampling.max_tokens", answer)
    config.put("learner.tokens_per_microbatch", max(length, packed or 0))
    body = config.record(f"{_SAMPLING}.extra_body")
    for name in ("top_p", "top_k", "min_p"):
        config.put(f"generators.sampling.{name}", body.pop(name, None))
    variables = {key: body.pop(key) for key in [*body] if key.startswith("chat_template_kwargs.")}
    config.put("model.chat_template_kwargs", {key.partition(".")[2]: each for key, each in variables.items()} or None)
    if body:
        config.notes.append(f"{_SAMPLING}.extra_body: {', '.join(body)} have no equivalent in generators.sampling.")


def _objective(config: Translation) -> None:
    size, samples = config.take("orchestrator.group_size"), config.take("orchestrator.batch_size")
    is_new = any(config.shown.get(key) == name for key, name in _NEW.items())
    config.put("learner.prompts_per_step", samples if is_new else max(1, samples // size))
    if not is_new:
        config.notes.append(
            f"orchestrator.batch_size={samples} counts samples, as in prime-rl before orchestrator.train.algo: set "
            "learner.prompts_per_step if it counts tasks."
        )
    kind, key = config.take("orchestrator.algo.type"), "orchestrator.algo"
    is_weighted = config.take(f"{key}.length_weighted_baseline")
    ours = {"grpo": "opo" if is_weighted else "dr_grpo", "default": "dr_grpo", "max_rl": "maxrl"}.get(kind)
    config.put("algorithm/advantage", ours)
    if ours is None:
        config.notes.append(f"{key}.type={kind}: choose algorithm/advantage, or for opd algorithm.distillation.")
    is_per_prompt = config.take(f"{key}.loss_aggregation") == "prompt"
    config.put("algorithm.loss_aggregation", "prompt_mean" if is_per_prompt else "token_mean")
    config.put("algorithm/policy_loss", "dppo")
    config.same_all("dppo")
    if config.take(f"{_LOSS}.type") not in (None, "default"):
        config.note(f"{_LOSS}.type", "algorithm/policy_loss=custom calls your function; dppo stands for it.")
    config.put("algorithm/correction", "none")
    config.put("algorithm.proximal", "generator")
    filters = config.given.get("orchestrator.pre_batch_filters") or config.given.get("orchestrator.filters") or []
    drops = any(each.get("type") == "zero_advantage" and each.get("enforce", True) for each in filters)
    names = ("filter_zero_advantages", "constant_trainer_batch_size", "buffer.online_difficulty_filtering")
    if any(config.take_all("orchestrator", *names)) or drops:
        config.put("buffer/filter", "zero_advantage")


def _optimizer(config: Translation) -> None:
    config.put("learner.optimizer.betas", config.take_all("trainer.optim", "betas1", "betas2"))
    kind, steps = config.take_all("trainer.scheduler", "type", "warmup_steps")
    if kind == "linear":
        config.note("trainer.scheduler.type", "prime-rl decays over the last decay_steps, here over the whole run.")
    config.put_schedule("trainer.scheduler.type", warmup_steps=steps)
    if config.below("trainer.model.lora"):
        config.take("trainer.model.lora")
        config.same_all("lora")
    offloads = bool(config.below("trainer.model.ac_offloading"))
    recomputes = offloads or bool(config.below("trainer.model.ac"))
    config.put_all("learner.engine", gradient_checkpointing=recomputes, offload_activations=offloads)
    whole, optimizer = config.take_all("trainer.model", "fsdp_cpu_offload", "optim_cpu_offload")
    config.put_all("learner.engine", offload_parameters=whole, offload_optimizer=whole or optimizer)


def _hardware(config: Translation) -> None:
    kind, size, replicas = config.take_all("deployment", "type", "gpus_per_node", "num_infer_replicas")
    ranks, rollouts = config.take_all("deployment", "num_train_gpus", "num_infer_gpus")
    nodes = config.take_all("deployment", "num_train_nodes", "num_infer_nodes")
    if kind == "multi_node":
        ranks, rollouts = (nodes[0] or 1) * size, (nodes[1] or 1) * size * replicas
    ranks = len(config.take("trainer_gpu_ids") or ()) or ranks
    rollouts = len(config.take("inference_gpu_ids") or ()) or rollouts
    config.put("learner.num_ranks", ranks)
    config.put("learner.engine.zero_stage", 3 if ranks > 1 or config.take("trainer.model.fsdp_cpu_offload") else 2)
    config.put("generators.count", max(1, rollouts // config.take("inference.vllm.tensor_parallel_size")))
    config.take("inference.parallel.dp")


def _environment(config: Translation) -> None:
    found: list[dict[str, Any]] = config.take("orchestrator.train.env") or []
    if len(found) != 1:
        config.notes.append(
            f"the file has {len(found)} environments, not one: name others in generators.agents, for rows with "
            "agent_name."
        )
    if not found:
        return
    task = found[0].get("taskset") or found[0].get("env", {}).get("taskset") or {}
    arguments = {key: value for key, value in task.items() if key != "id"} or found[0].get("args")
    config.put("generators/agent", "environment")
    name = task.get("id") or found[0].get("id") or found[0].get("name")
    config.put_all("generators.agent", environment=name, arguments=arguments or None)
    config.notes.append(
        "write the rows of the environment into files with `python -m slipstream.scripts.make_prompts`, and set "
        "data.train, data.eval, and generators.agent.python (docs/agents.md)."
    )


def _run(config: Translation) -> None:
    evaluates, skips = config.below("orchestrator.eval"), config.take("orchestrator.eval.skip_first_step")
    config.put("evaluation.every_steps", config.take("orchestrator.eval.interval") if evaluates else 0)
    config.put("evaluation.before_training", bool(evaluates) and not skips)
    config.note("orchestrator.eval.group_size", "set `samples` in data.eval.")
    config.same("wandb.name", "name", lambda name: str(name).replace("/", "_"))
    options = {name: f"wandb.{name}" for name in ("project", "entity", "group", "tags")}
    config.put_loggers("wandb" if config.below("wandb") else None, options=options)


PRIME_RL = Trainer("prime_rl.yaml", special=(_lengths, _objective, _optimizer, _hardware, _environment, _run))
