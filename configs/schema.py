"""The tree of settings: keys, groups with options, and suggestions for misspelled names.

A field that holds one of several tagged records is a group with the tags as options: `BufferConfig.store` becomes
`buffer/store=embedded | redis`. A generated option holds only the tag; defaults stay in the records. YAML presets are
more options (`buffer/store=embedded_large`) or form their own groups (`recipe=dapo`).
"""

import ast
import inspect
import itertools
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from hydra.core.config_store import ConfigStore
from msgspec.inspect import Field, ListType, StructType, Type, UnionType, type_info
from omegaconf import DictConfig, OmegaConf

from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig

PRESETS = Path(__file__).resolve().parent / "presets"
"""Folder of the YAML presets; each subfolder is a group."""
_SIMILAR_KEY = 0.8
"""Minimum similarity of the last parts of two keys."""
_IN_LIST = 0.5
"""Penalty for keys within list entries."""
_SIMILAR_SIBLING = 0.7
"""The same within one record or group, where fewer names compete."""


class Setting(NamedTuple):
    """One key of the tree, which can be a value, a record, or a group.

    Example: Setting(key="learner.engine.zero_stage", field=..., record=DeepSpeedEngineConfig,
    variant="learner/engine=deepspeed")
    """

    key: str
    """Dotted; entries of a list are `prepare[]`."""
    field: Field
    record: type
    """Declares the field."""
    variant: str
    """`group=option` that selects the record; empty outside groups."""

    @property
    def group(self) -> str:
        """Command line group at this key, if any."""
        return self.key.replace(".", "/")

    @property
    def name(self) -> str:
        """Left side of an override: the group, if it is one, otherwise the key."""
        return self.group if self.tags else self.key

    @property
    def meaning(self) -> str:
        """Docstring of the field as one paragraph; empty if missing."""
        return field_docstrings(self.record).get(self.field.name, "")

    @property
    def records(self) -> list[StructType]:
        """Records that the field can hold, including list entries; empty for a plain value."""
        return [found for found in _alternatives(self.field.type) if isinstance(found, StructType)]

    @property
    def tags(self) -> tuple[str, ...]:
        """Options, if the field is a group; otherwise empty."""
        in_list = isinstance(self.field.type, ListType)
        return () if in_list else tuple(str(found.tag) for found in self.records if found.tag is not None)


@cache
def settings() -> tuple[Setting, ...]:
    """Every key of every variant, in the order of the records."""
    root = type_info(RunConfig)
    assert isinstance(root, StructType)
    return tuple(_walk(root, prefix="", variant=""))


def _walk(record: StructType, *, prefix: str, variant: str) -> Iterator[Setting]:
    for field in record.fields:
        setting = Setting(prefix + field.encode_name, field, record.cls, variant)
        yield setting
        options = field.type.types if isinstance(field.type, UnionType) else (field.type,)
        inner = f"{setting.key}[]." if any(isinstance(each, ListType) for each in options) else f"{setting.key}."
        for found in setting.records:
            option = f"{setting.group}={found.tag}" if found.tag is not None else variant
            yield from _walk(found, prefix=inner, variant=option)


def _alternatives(expected: Type) -> tuple[Type, ...]:
    if isinstance(expected, ListType):
        return _alternatives(expected.item_type)
    if isinstance(expected, UnionType):
        return tuple(found for option in expected.types for found in _alternatives(option))
    return (expected,)


@cache
def variants() -> dict[str, tuple[str, ...]]:
    """Group -> tags of its records."""
    return {setting.group: setting.tags for setting in settings() if setting.tags}


@cache
def field_docstrings(record: type) -> dict[str, str]:
    """Field -> the string literal below it, including inherited fields."""
    found: dict[str, str] = {}
    for base in reversed([base for base in record.__mro__ if base.__module__.startswith("slipstream.")]):
        (declared,) = ast.parse(inspect.getsource(base)).body
        body = declared.body if isinstance(declared, ast.ClassDef) else []
        for statement, below in itertools.pairwise(body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    found[name] = " ".join(text.split())
    return found


@cache
def groups() -> dict[str, list[str]]:
    """Group -> its options, sorted. The first call registers generated options with Hydra."""
    options: dict[str, set[str]] = {}
    for group, tags in variants().items():
        options[group] = set(tags)
        for tag in tags:
            ConfigStore.instance().store(group=group, name=tag, node={"kind": tag}, provider="slipstream")
    for file in PRESETS.rglob("*/*.yaml"):
        options.setdefault(file.parent.relative_to(PRESETS).as_posix(), set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def preset_of_file(group: str, file: Path, *, chosen: Collection[str] = ()) -> str:
    """Register a user's YAML file as an option of the group; return the option's name.

    The file has the format of the presets, or is the resolved configuration of a run. `chosen`: groups that the command
    line chooses, which replace the file's choice. Raises ConfigError.
    """
    try:
        node = OmegaConf.load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{group}={file} must be a readable YAML file: {' '.join(str(error).split())}.") from None
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{group}={file} must contain settings as key: value, got a list.")
    is_resolved = {setting.key for setting in settings() if "." not in setting.key} <= set(node)
    for other in chosen:
        parent, _, name = other.replace("/", ".").rpartition(".")
        record = OmegaConf.select(node, parent) if parent else node
        if not record or name not in record:
            continue
        if is_resolved or (isinstance(record[name], DictConfig) and "kind" in record[name]):
            del record[name]
        if is_resolved and parent == "algorithm":
            # The file holds the policy that `auto` chose for its own variants.
            record.pop("proximal", None)
    is_record = any(setting.group == group for setting in settings())
    name = file.as_posix().replace("/", "|")
    ConfigStore.instance().store(
        group=group, name=name, node=node, package=None if is_record else "_global_", provider="slipstream"
    )
    return name


_TRL, _VERL, _OPENRLHF, _PRIME = "TRL's", "verl's", "OpenRLHF's", "prime-rl's"
PEER_NAMES = {
    # model and data
    "model_name_or_path": (_TRL, "model.path"),
    "pretrain": (_OPENRLHF, "model.path"),
    "bf16": (_TRL, "model.dtype"),
    "torch_dtype": (_TRL, "model.dtype"),
    "lora_r": (_TRL, "model.lora.rank"),
    "lora_rank": (_VERL, "model.lora.rank"),
    "lora_alpha": (_VERL, "model.lora.alpha"),
    "max_model_len": (_VERL, "model.max_length"),
    "seq_len": (_PRIME, "model.max_length"),
    "dataset_name": (_TRL, "data.train"),
    "train_files": (_VERL, "data.train"),
    "prompt_data": (_OPENRLHF, "data.train"),
    "val_files": (_VERL, "data.eval"),
    "eval_dataset": (_OPENRLHF, "data.eval"),
    "max_prompt_length": (_VERL, "data.max_prompt_tokens"),
    "prompt_max_len": (_OPENRLHF, "data.max_prompt_tokens"),
    # generation
    "num_generations": (_TRL, "generators.group_size"),
    "rollout.n": (_VERL, "generators.group_size"),
    "n_samples_per_prompt": (_OPENRLHF, "generators.group_size"),
    "rollouts_per_example": (_PRIME, "generators.group_size"),
    "max_completion_length": (_TRL, "generators.sampling.max_tokens"),
    "max_response_length": (_VERL, "generators.sampling.max_tokens"),
    "generate_max_len": (_OPENRLHF, "generators.sampling.max_tokens"),
    "max_new_tokens": ("transformers'", "generators.sampling.max_tokens"),
    "reward_funcs": (_TRL, "generators.reward.functions"),
    "custom_reward_function": (_VERL, "generators.reward.function"),
    "remote_rm_url": (_OPENRLHF, "generators.reward.function"),
    "tensor_model_parallel_size": (_VERL, "generators.engine.tensor_parallel_size"),
    "vllm_tensor_parallel_size": (_OPENRLHF, "generators.engine.tensor_parallel_size"),
    "vllm_gpu_memory_utilization": (_OPENRLHF, "generators.engine.gpu_memory_utilization"),
    "vllm_num_engines": (_OPENRLHF, "generators.count"),
    # batches and steps
    "per_device_train_batch_size": (_TRL, "learner.prompts_per_step"),
    "train_batch_size": (_VERL, "learner.prompts_per_step"),
    "rollout_batch_size": (_OPENRLHF, "learner.prompts_per_step"),
    "batch_size": (_PRIME, "learner.prompts_per_step"),
    "ppo_mini_batch_size": (_VERL, "algorithm.updates_per_step"),
    "steps_per_generation": (_TRL, "algorithm.updates_per_step"),
    "ppo_epochs": (_VERL, "buffer.reuse.max_uses"),
    "num_iterations": (_TRL, "buffer.reuse.max_uses"),
    "gradient_accumulation_steps": (_TRL, "learner.tokens_per_microbatch"),
    "ppo_micro_batch_size_per_gpu": (_VERL, "learner.tokens_per_microbatch"),
    "micro_train_batch_size": (_OPENRLHF, "learner.tokens_per_microbatch"),
    "num_train_epochs": (_TRL, "learner.epochs"),
    "total_epochs": (_VERL, "learner.epochs"),
    "total_training_steps": (_VERL, "learner.max_steps"),
    "num_episodes": (_OPENRLHF, "learner.epochs"),
    "save_steps": (_TRL, "learner.checkpoint.every_steps"),
    "save_freq": (_VERL, "learner.checkpoint.every_steps"),
    "eval_steps": (_TRL, "evaluation.every_steps"),
    "test_freq": (_VERL, "evaluation.every_steps"),
    "evaluation.interval": (_PRIME, "evaluation.every_steps"),
    # optimizer
    "lr": (_VERL, "learner.optimizer.learning_rate"),
    "lr_scheduler_type": (_TRL, "learner.optimizer.schedule"),
    "warmup_ratio": (_TRL, "learner.optimizer.warmup_steps"),
    "lr_warmup_steps": (_VERL, "learner.optimizer.warmup_steps"),
    "grad_clip": (_VERL, "learner.optimizer.max_grad_norm"),
    # objective
    "adv_estimator": (_VERL, "algorithm/advantage"),
    "advantage_estimator": (_OPENRLHF, "algorithm/advantage"),
    "scale_rewards": (_TRL, "algorithm/advantage"),
    "loss_mode": (_VERL, "algorithm/policy_loss"),
    "loss_type": (_TRL, "algorithm.loss_aggregation"),
    "loss_agg_mode": (_VERL, "algorithm.loss_aggregation"),
    "clip_ratio": (_VERL, "algorithm.policy_loss.clip_high"),
    "clip_ratio_high": (_VERL, "algorithm.policy_loss.clip_high"),
    "clip_ratio_low": (_VERL, "algorithm.policy_loss.clip_low"),
    "eps_clip": (_OPENRLHF, "algorithm.policy_loss.clip_high"),
    "policy_loss.epsilon": (_TRL, "algorithm.policy_loss.clip_high"),
    "epsilon_high": (_TRL, "algorithm.policy_loss.clip_high"),
    "beta": (_TRL, "algorithm.kl.coef"),
    "kl_loss_coef": (_VERL, "algorithm.kl.coef"),
    "kl_coef": (_VERL, "algorithm.kl.coef"),
    "init_kl_coef": (_OPENRLHF, "algorithm.kl.coef"),
    "entropy_coeff": (_VERL, "algorithm.entropy_coef"),
    "dynamic_filtering": (_OPENRLHF, "buffer/filter"),
    "filter_groups": (_VERL, "buffer/filter"),
    # staleness
    "max_async_level": (_PRIME, "staleness.max_lag"),
    "max_off_policy_steps": (_PRIME, "staleness.max_lag"),
    "staleness_threshold": (_VERL, "staleness.max_lag"),
    "max_staleness": (_TRL, "staleness.max_lag"),
    "max_head_offpolicyness": ("AReaL's", "staleness.max_lag"),
    "weight_sync_steps": (_TRL, "weights.publish_every_steps"),
    # the run
    "output_dir": (_TRL, "runs_dir"),
    "run_name": (_TRL, "name"),
    "experiment_name": (_VERL, "name"),
    "resume_from_checkpoint": (_TRL, "resume"),
    "report_to": (_TRL, "loggers"),
    "trainer.logger": (_VERL, "loggers"),
}
"""Other trainers' names, as ends of dotted keys -> trainer, our key or group."""


_PENALTY = "the learner could not compute the probabilities that tokens were sampled with; give the reward a penalty"
_UNSUPPORTED = dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _PENALTY)


def unknown_key(key: str) -> str:
    """Error message for `key`, with the key meant, the variants that have it, or its siblings."""
    owners = {setting.variant for setting in settings() if setting.key == key}
    if owners:
        return f"unknown key {key}: it belongs to {' and '.join(sorted(owners))}."
    if (name := key.rpartition(".")[2]) in _UNSUPPORTED:
        return f"unknown key {key}: {name} is not supported, because {_UNSUPPORTED[name]}."
    if name := _peer_name(key):
        trainer, ours = PEER_NAMES[name]
        return f"unknown key {key}: {name} is {trainer} name; here it is {ours}."
    if found := nearest_key(key):
        return f"unknown key {key}; did you mean {found}?"
    return f"unknown key {key}; {_siblings(key)}."


def _peer_name(key: str) -> str:
    path = key.split(".")
    name = next((name for name in (".".join(path[-2:]), path[-1]) if name in PEER_NAMES), "")
    # `policy_loss.beta` is nearer to our setting with that end.
    is_ours = len(path) > 1 and any(setting.key.endswith("." + ".".join(path[-2:])) for setting in settings())
    return "" if is_ours else name


def unknown_option(group: str, option: object) -> str:
    """Error message for `group=option`, with the option meant (also of another group), or all options."""
    options = groups()[group]
    if group == "model" and "/" in str(option):
        return f"unknown option model={option}; a folder or hub name is set as model.path={option}."
    # A prefix within this group wins over a name in another: experiment=gsm8k does not mean data=gsm8k.
    meant = [f"{group}={name}" for name in options if name.startswith(f"{option}_")]
    elsewhere = [f"{other}={option}" for other in groups() if option in groups()[other]]
    if not meant and len(elsewhere) == 1:
        meant = elsewhere
    if not meant:
        scores = {f"{group}={name}": SequenceMatcher(None, str(option), name).ratio() for name in options}
        best = max(scores.values())
        meant = [choice for choice, score in scores.items() if score == best >= _SIMILAR_SIBLING]
    advice = f"did you mean {' or '.join(meant)}?" if meant else f"choose one of {', '.join(options)}."
    return f"unknown option {group}={option}; {advice}"


def nearest_key(wrong: str) -> str | None:
    """Key or group that `wrong` most likely means; None if nothing is similar.

    Candidates have a similar last part (`max_step`, `lr`, `kl_coef`); the whole path ranks them.
    """
    path = wrong.replace("/", ".")
    if name := _peer_name(path):
        return PEER_NAMES[name][1]
    names = {name.replace("/", "."): name for name in groups()}
    names = {setting.key: setting.key for setting in settings()} | names
    scores = {name: _similarity(path, key) for key, name in names.items()}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > 0 else None


def _similarity(wrong: str, key: str) -> float:
    """0 to 2; 0 if the last parts differ too much."""
    wrong_parent, _, end = wrong.rpartition(".")
    parent, _, last = key.rpartition(".")
    if wrong_parent == parent and end.startswith(f"{last}_"):
        # Such as a unit added: nearer than the same name elsewhere.
        return 2.0
    similarity = max(_end_similarity(end, last), _end_similarity(end, f"{parent.rpartition('.')[2]}_{last}"))
    needed = _SIMILAR_SIBLING if wrong_parent == parent else _SIMILAR_KEY
    # List entries are rarely set one field at a time.
    penalty = _IN_LIST if "[]" in key else 0.0
    return similarity + SequenceMatcher(None, wrong, key).ratio() - penalty if similarity >= needed else 0.0


def _end_similarity(wrong: str, name: str) -> float:
    is_abbreviation = wrong == "".join(word[:1] for word in name.split("_")) or (
        len(wrong) >= 4 and name.startswith(wrong)
    )
    return 1.0 if is_abbreviation else SequenceMatcher(None, wrong, name).ratio()


def _siblings(key: str) -> str:
    parent = key
    while parent:
        parent = parent.rpartition(".")[0]
        names = [setting.key for setting in settings() if setting.key.rpartition(".")[0] == parent]
        if names:
            inner = dict.fromkeys(name.rpartition(".")[2] for name in names)
            return f"{parent or 'the config'} has {', '.join(inner)}"
    raise AssertionError("the root record has keys")
