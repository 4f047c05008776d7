"""Plan: estimate a run's memory from its settings and config.json.

Activations are traced on meta tensors. Fragmentation, tools, and rewards are excluded.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil, inf

import msgspec
import psutil
import torch
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from slipstream.configs.base import ConfigError, first_line, require
from slipstream.configs.broker import PROBE_SEQUENCES
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import HfEngineConfig, ScriptedEngineConfig, VllmEngineConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig
from slipstream.configs.load import derived_sizes, load
from slipstream.configs.run import RunConfig
from slipstream.launch.generator_pool import place
from slipstream.learner.engines.deepspeed_engine import BUCKET_ELEMENTS
from slipstream.learner.engines.optimizer import hidden_matrices
from slipstream.learner.training.model import COMPUTE_DTYPES
from slipstream.learner.training.saved_model import FILE_BYTES
from slipstream.learner.training.step_memory import layer_input_bytes, step_bytes
from slipstream.runtime.command_line import add_row, exit_with_error, make_console, make_table
from slipstream.runtime.lora import adapter_parameters, meta_model
from slipstream.runtime.model_files import check_model_path
from slipstream.runtime.process import group_limits

GIB = 2**30
HOST, STAGED = "host", "staged version"
TOO_LARGE = 1
"""Exit code."""
_FLOAT = 4
_BLOCK, _MIN_8_BIT = 256, 4096
"""bitsandbytes: elements of a block, and of the smallest tensor with moments in 8 bits."""
_MAX_LIVE_ELEMENTS = 10**9
"""Parameters that ZeRO-3 keeps gathered: DeepSpeed's default."""
_SUB_GROUP_ELEMENTS = 10**9
"""Parameters that ZeRO-3 updates at once: DeepSpeed's default."""
_LIBRARIES_GIB = {"learner": 0.6, "generator": 0.5, "engine": 1.0, "broker": 0.15}
"""Host memory after imports."""
_CONTEXT_GIB = 0.8
"""CUDA context, kernels, and NCCL buffers, per GPU."""
_GRAPHS_GIB = 1.0
_BATCHED_TOKENS = 2048
"""Default of max_num_batched_tokens."""
_SHARED_FRACTION = 0.92
"""The rest of a shared GPU covers fragmentation."""
_SPARE_CACHE_GIB = 0.25
"""Extra KV cache for partly used blocks."""
_KV_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_QUANTIZED_BYTES = {"nvfp4_per_token": 0.5}
"""Bytes per weight; 1 for every other quantization."""
_RATES = {"GPU memory": 2.5e12, "PCIe": 50e9, "checksums": 10.6e9, "CPU: write": 3.1e9, "CPU: load": 0.155e9}
"""Bytes/s of an H100, from specifications and docs/weights.md."""
_EXCHANGE_S = 0.01
_COMPARED = 1 / 8
"""Part of the layers that an update compares."""

_ADVICE = {
    "activations": "lower learner.tokens_per_microbatch, raise learner.sequence_parallel, or set "
    "learner.engine.gradient_checkpointing=true, then learner.engine.offload_activations=true",
    "weights": "shard them with learner/engine=deepspeed_zero3 over more learner.num_ranks, or set "
    "learner.engine.offload_parameters=true",
    "gradients": "shard them with learner/engine=deepspeed_zero2 over more learner.num_ranks",
    "optimizer": "set learner.engine.offload_optimizer=true, or shard it over more learner.num_ranks",
    "reference": "shard it with learner/engine=deepspeed_zero3 over more learner.num_ranks",
    "teacher": "shard it with learner/engine=deepspeed_zero3 over more learner.num_ranks",
    "critic": "take an advantage without a critic, or shard it over more learner.num_ranks",
    "process reward": "take an advantage without process rewards, or shard it over more learner.num_ranks",
    "checkpoint": "raise learner.num_ranks, which share its files, or use a machine with more memory",
    "engine": "raise generators.engine.tensor_parallel_size, or lower generators.engine.gpu_memory_utilization",
    "KV cache": "lower generators.engine.kv_cache_gib or generators.count",
    "published version, received": "lower generators.count on this machine",
    "store": "lower buffer.store.max_memory_mib",
}
"""Start of a cause -> remedy."""
_LESS_WITH_LORA = ("weights", "gradients", "optimizer", "reference", "checkpoint")


class Need(msgspec.Struct, frozen=True):
    """Memory of one process for one cause: Need("learner rank 0", "gpu 0", "gradients", 14.2)"""

    process: str
    place: str
    """`host`, or `gpu N`."""
    cause: str
    gib: float


class Machine(msgspec.Struct, frozen=True):
    """Memory that a machine has for a run."""

    host_gib: float
    gpus: int = 0
    gpu_gib: float = 0.0

    @staticmethod
    def here(*, host_gib: float | None, gpus: int | None, gpu_gib: float | None) -> "Machine":
        """Describe this machine, with overrides. Raises ConfigError."""
        found = torch.cuda.device_count()
        count, size = found if gpus is None else gpus, gpu_gib
        if count and size is None:
            require(found > 0, "plan --gpus", "come with --gpu-gib", got=count, why="this machine has no GPU")
            size = min(torch.cuda.get_device_properties(i).total_memory for i in range(found)) / GIB
        total = min([psutil.virtual_memory().total, *(each.limit for each in group_limits("memory"))])
        return Machine(host_gib or total / GIB, count, size or 0.0)

    def capacity(self, place: str) -> float:
        return self.host_gib if place == HOST else self.gpu_gib


class UpdateEstimate(msgspec.Struct, frozen=True):
    """Durations of a weight update on one machine, seconds: UpdateEstimate(14.2, 0.02, 3.5, 0.17)"""

    gib: float
    """Size of the version, GiB."""
    learner_waits_s: float
    update_s: float
    """Time from a step's end until the engines have switched."""
    pause_s: float
    """Part of `update_s` in which generators do not generate."""


class Plan(msgspec.Struct, frozen=True):
    """Memory needs of a run, and where they do not fit."""

    machine: Machine
    needs: list[Need]
    problems: list[str]
    update: UpdateEstimate | None = None
    """None without vLLM, or if generators fetch versions."""

    def total(self, place: str) -> float:
        return sum(need.gib for need in self.needs if need.place == place)


def make_plan(run: RunConfig, machine: Machine) -> Plan:
    """Estimate a run's needs. Raises ConfigError for an unreadable model config or too few GPUs."""
    placed = place(run, gpus=[str(number) for number in range(machine.gpus)])
    policy = _meta(run.model, setting="model.path")
    needs = list(_learner_needs(run, policy, gpus=placed.get("learner", [])))
    problems, update = [], None
    if run.mode != "sft":
        names = [f"generator-{index}" for index in range(run.generators.count)]
        for name in names:
            needs += _engine_needs(run, policy, name, gpus=placed.get(name, []))
        if names and isinstance(run.generators.engine, VllmEngineConfig):
            own = {name: _places(run.generators.engine, placed.get(name, [])) for name in names}
            first = own[names[0]][0]
            cache = _cache_gib(run, policy, machine, needs, where=first, num_engines=len(names))
            problems += _cache_problems(run, policy, machine, needs, where=first, cache=cache)
            needs += [Need(name, held, "KV cache", cache) for name in names for held in own[name]]
            needs += _auto_staged(run, policy, machine, needs) if run.weights.staging == "auto" else []
            if _maps_versions(run):
                update = _estimate_update(run, policy, needs, on_gpu=bool(placed.get(names[0])))
        needs.append(Need("broker", HOST, "libraries", _LIBRARIES_GIB["broker"] * run.broker.shards))
        if isinstance(run.buffer.store, EmbeddedRedisConfig):
            needs.append(Need("store", HOST, "store, full", run.buffer.store.max_memory_mib / 1024))
    plan = Plan(machine, needs, problems, update)
    too_small: dict[str, list[str]] = {}
    for where in sorted({need.place for need in needs}):
        if (total := plan.total(where)) > (there := machine.capacity(where)):
            largest = max((need for need in needs if need.place == where), key=lambda need: need.gib)
            problem = f"must hold {total:.1f} GiB, got {there:.1f}: the largest part is {largest.cause} "
            problem += f"({largest.gib:.1f} GiB); {_advice(largest.cause, run.model)}."
            too_small.setdefault(problem, []).append(where)
    problems += [f"{', '.join(places)} {problem}" for problem, places in too_small.items()]
    return plan


def _maps_versions(run: RunConfig) -> bool:
    """Whether generators map the learner's memory."""
    return run.weights.transport == "collective" and run.cluster.kind == "local"


def _auto_staged(run: RunConfig, policy: PreTrainedModel, machine: Machine, needs: Sequence[Need]) -> list[Need]:
    """The copy that `Stager` makes on rank 0's GPU if it has room after the first step."""
    process, size = "learner rank 0", _published_gib(run, policy)
    held = [need.place for need in needs if need.process == process and need.place != HOST][:1]
    free = machine.gpu_gib - sum(need.gib for need in needs if need.place in held)
    return [Need(process, held[0], STAGED, size)] if held and 2 * size <= free else []


def _estimate_update(run: RunConfig, policy: PreTrainedModel, needs: Sequence[Need], *, on_gpu: bool) -> UpdateEstimate:
    engine, size = run.generators.engine, _published_gib(run, policy) * GIB
    assert isinstance(engine, VllmEngineConfig)
    is_staged = any(need.cause == STAGED for need in needs)
    to_host = size / _RATES["PCIe" if any(n.place != HOST for n in needs if "rank" in n.process) else "CPU: write"]
    # A copy reads and writes the version.
    waits = 2 * size / _RATES["GPU memory"] if is_staged else to_host
    # By the learner, then by the generators.
    other = 2 * size / _RATES["checksums"] + (to_host if is_staged else 0.0)
    load = size / engine.num_workers / _RATES["PCIe" if on_gpu else "CPU: load"]
    if _has_second_copy(engine, policy, on_gpu=on_gpu):
        pause = _EXCHANGE_S
        other += load
    else:
        pause = load * (1 + _COMPARED)
    return UpdateEstimate(size / GIB, waits, waits + other + pause, pause)


def _has_second_copy(engine: VllmEngineConfig, model: PreTrainedModel, *, on_gpu: bool) -> bool:
    """Whether the engine loads a version while it generates, as `ModelVersions` decides."""
    text = model.config.get_text_config()
    has_parts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "kv_lora_rank"))
    return not (on_gpu or engine.enforce_eager is False or has_parts)


def _advice(cause: str, model: ModelConfig) -> str:
    text = next((text for word, text in _ADVICE.items() if cause.startswith(word)), "use a larger machine")
    return f"{text}, or train model.lora" if cause.startswith(_LESS_WITH_LORA) and not model.lora else text


def _meta(config: ModelConfig, *, setting: str) -> PreTrainedModel:
    try:
        return meta_model(config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        must = f"{setting} must name a model whose config.json can be read"
        raise ConfigError(f"{must}, got {config.path!r}: {first_line(error)}") from error


def show_plan(
    overrides: list[str], *, gpus: int | None, gpu_gib: float | None, host_gib: float | None, is_json: bool
) -> None:
    """Print needs and sizes; exit with TOO_LARGE if they do not fit. Raises ConfigError."""
    run = load(overrides)
    check_model_path(run.model.path)
    plan = make_plan(run, Machine.here(host_gib=host_gib, gpus=gpus, gpu_gib=gpu_gib))
    if is_json:
        print(msgspec.json.encode({"plan": plan, "sizes": derived_sizes(run)}).decode())
    else:
        console = make_console()
        for table in tables(plan):
            console.print(table, "")
        shown = derived_sizes(run)
        if update := plan.update:
            waits = f"{update.gib:.2f} GiB: the learner waits {update.learner_waits_s:.2g} s, generators switch after"
            shown["weight update, estimated"] = f"{waits} {update.update_s:.2g} s, and pause {update.pause_s:.2g} s"
        for name, value in shown.items():
            console.print(f"{name:<34}  {value}")
    if plan.problems:
        exit_with_error("\nerror: ".join(plan.problems), code=TOO_LARGE)


def tables(plan: Plan) -> list[Table]:
    """Tables of needs, and of sums by place."""
    by_cause = make_table("process", "place", "cause", "GiB", numbers=("GiB",))
    alike: dict[tuple[tuple[str, str, float], ...], list[str]] = {}
    for name in dict.fromkeys(need.process for need in plan.needs):
        own = [need for need in plan.needs if need.process == name]
        alike.setdefault(tuple((need.place.split()[0], need.cause, need.gib) for need in own), []).append(name)
    for rows, names in alike.items():
        shown = names[0] if len(names) == 1 else f"each of {', '.join(names)}"
        for (where, cause, gib), count in Counter(rows).items():
            add_row(by_cause, shown, f"{count} {where}s" if count > 1 else where, cause, f"{gib:,.2f}")
    sums = make_table("place", "GiB needed", "GiB there", numbers=("GiB needed", "GiB there"))
    for where in sorted({need.place for need in plan.needs}):
        add_row(sums, where, f"{plan.total(where):,.1f}", f"{plan.machine.capacity(where):,.1f}")
    return [by_cause, sums]


def _learner_needs(run: RunConfig, policy: PreTrainedModel, *, gpus: Sequence[str]) -> Iterator[Need]:
    size, engine, algorithm = run.learner.num_ranks, run.learner.engine, run.algorithm
    activations = step_bytes(run, policy, on_gpu=bool(gpus)) / run.learner.sequence_parallel / GIB
    on_host = 0.0
    if isinstance(engine, DeepSpeedEngineConfig) and engine.offload_activations:
        on_host = layer_input_bytes(run, policy) / run.learner.sequence_parallel / GIB
    width = COMPUTE_DTYPES[run.model.dtype].itemsize
    models = {"weights": (_num_elements(policy), *_moved(policy, run.learner.optimizer))}
    if run.mode != "sft":
        if algorithm.needs_reference and not run.model.lora:
            models["reference"] = (_num_elements(policy), 0, 0)
        if algorithm.distillation:
            chosen = msgspec.structs.replace(run.model, path=algorithm.distillation.teacher_path, lora=None)
            models["teacher"] = (_num_elements(_meta(chosen, setting="algorithm.distillation.teacher_path")), 0, 0)
        if second := algorithm.second_model:
            chosen = msgspec.structs.replace(run.model, path=second.path or run.model.path, lora=None)
            module = _meta(chosen, setting=f"algorithm.{second.key}.path")
            trained = module.base_model if algorithm.advantage.needs_critic else module
            models[second.key.replace("_", " ")] = (_num_elements(trained), *_moved(trained, second.optimizer))
    for rank in range(size):
        name, device = f"learner rank {rank}", f"gpu {gpus[rank % len(gpus)]}" if gpus else HOST
        if gpus:
            yield Need(name, device, "context and libraries", _CONTEXT_GIB)
        yield Need(name, HOST, "libraries", _LIBRARIES_GIB["learner"])
        for model, sizes in models.items():
            for cause, is_away, num_bytes in _states(model, *sizes, engine=engine, size=size, width=width):
                yield Need(name, HOST if is_away else device, cause, num_bytes / GIB)
        # The optimizer widens gradients when no activations are left.
        own = [(activations - on_host, "activations of the largest microbatch")]
        if width < _FLOAT and not (isinstance(engine, DeepSpeedEngineConfig) and engine.offload_optimizer):
            widened = models["weights"][1] / (size if engine.zero_stage else 1)
            widened = min(widened, _SUB_GROUP_ELEMENTS) if engine.zero_stage == 3 else widened
            own.append((widened * _FLOAT / GIB, "gradients in float32, for the optimizer"))
        yield Need(name, device, max(own)[1], max(own)[0])
        if on_host:
            yield Need(name, HOST, "inputs of layers", on_host)
        # Copied between steps and written during later ones.
        trained = [sizes for sizes in models.values() if sizes[1]]
        copied = sum((moved + moments) * _FLOAT / size for _, moved, moments in trained)
        saved = _FLOAT if run.model.lora else width
        copied += sum(_file_bytes(elements * saved, rank=rank, size=size) for elements, _, _ in trained)
        yield Need(name, HOST, "checkpoint being written", copied / GIB)
        if rank == 0 and run.mode != "sft":
            # One version is sent while the next is queued.
            yield Need(name, HOST, "published versions, two", 2 * _published_gib(run, policy))
            if gpus and run.weights.staging == "device":
                yield Need(name, device, STAGED, _published_gib(run, policy))


def _moved(model: nn.Module, config: OptimizerConfig) -> tuple[int, float]:
    """(trained elements, size of their moments in float32 numbers)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = hidden_matrices(model) if config.name == "muon" else set()
    is_small = config.name == "adamw_8bit"

    # Muon has one moment of hidden matrices. bitsandbytes keeps a byte, and a float32 of each block, unless a tensor is
    # small.
    def width(each: nn.Parameter) -> float:
        return 1 if id(each) in hidden else 2 * (1 / 4 + 1 / _BLOCK if is_small and each.numel() >= _MIN_8_BIT else 1)

    return sum(each.numel() for each in trained), sum(width(each) * each.numel() for each in trained)


def _file_bytes(total: int, *, rank: int, size: int) -> int:
    """The rank's share of a saved model, in files."""
    files = range(rank, ceil(total / FILE_BYTES), size)
    return sum(min(FILE_BYTES, total - index * FILE_BYTES) for index in files)


def _states(
    model: str, elements: int, moved: int, moments: float, *, engine: object, size: int, width: int
) -> Iterator[tuple[str, bool, float]]:
    """Yield (cause, is in host memory, bytes) of a model on one rank. `width`: bytes per weight."""
    stage, offloads, is_away = 0, False, False
    if isinstance(engine, DeepSpeedEngineConfig):
        stage, offloads, is_away = engine.zero_stage, engine.offload_optimizer, engine.offload_parameters
    prefix, parts = "" if model == "weights" else f"{model}: ", size if stage else 1
    named = f"{prefix}weights"
    yield named, is_away, (elements / size if stage == 3 else elements) * width
    if stage == 3:
        yield f"{named}, gathered", False, min(elements, _MAX_LIVE_ELEMENTS) * width
    if not moved:
        return
    yield f"{prefix}gradients", offloads and stage >= 2, (moved / size if stage >= 2 else moved) * width
    if stage or width < _FLOAT:
        yield f"{prefix}optimizer: master weights", offloads, moved / parts * _FLOAT
    if stage:
        yield f"{prefix}gradients, a bucket to reduce", False, min(BUCKET_ELEMENTS, moved) * width
    yield f"{prefix}optimizer: moments", offloads, moments / parts * _FLOAT


def _engine_needs(run: RunConfig, model: PreTrainedModel, name: str, *, gpus: Sequence[str]) -> list[Need]:
    engine, text = run.generators.engine, model.config.get_text_config()
    needs = [Need(name, HOST, "libraries", _LIBRARIES_GIB["generator"])]
    if isinstance(engine, ScriptedEngineConfig):
        return needs
    if not _maps_versions(run) and run.weights.transport != "memory":
        needs.append(Need(name, HOST, "published version, received", _published_gib(run, model)))
    width = getattr(torch, run.model.dtype).itemsize
    if isinstance(engine, HfEngineConfig):
        where = f"gpu {gpus[0]}" if gpus else HOST
        return [*needs, Need(name, where, "engine: weights", _num_elements(model) * width / GIB)]
    weight_bytes = _QUANTIZED_BYTES.get(engine.quantization, 1) if engine.quantization else width
    own = {
        "engine: weights": _num_elements(model) * weight_bytes / engine.num_workers / GIB,
        "engine: logits of a step": engine.max_num_seqs * text.vocab_size * _FLOAT * 2 / GIB,
    }
    if _has_second_copy(engine, model, on_gpu=bool(gpus)) and not run.model.lora:
        own["engine: second copy, for the next version"] = own["engine: weights"]
    if gpus:
        inner = 3 * getattr(text, "intermediate_size", 4 * text.hidden_size) / engine.num_workers
        tokens = engine.max_num_batched_tokens or _BATCHED_TOKENS
        own["engine: activations of a step"] = tokens * (4 * text.hidden_size + inner) * width / GIB
        own["engine: context and graphs"] = _CONTEXT_GIB + (0.0 if engine.enforce_eager else _GRAPHS_GIB)
    needs.append(Need(name, HOST, "engine: libraries", _LIBRARIES_GIB["engine"] * engine.num_workers))
    return needs + [Need(name, where, cause, gib) for where in _places(engine, gpus) for cause, gib in own.items()]


def _places(engine: VllmEngineConfig, gpus: Sequence[str]) -> list[str]:
    return [f"gpu {gpu}" for gpu in gpus] or [HOST] * engine.num_workers


def _cache_gib(
    run: RunConfig, model: PreTrainedModel, machine: Machine, needs: Sequence[Need], *, where: str, num_engines: int
) -> float:
    """The engine's KV cache per device, given all other needs."""
    engine = run.generators.engine
    assert isinstance(engine, VllmEngineConfig)
    if where == HOST or engine.kv_cache_gib is not None:
        return engine.kv_cache_gib or 1.0
    taken = sum(need.gib for need in needs if need.place == where)
    if not _is_shared(needs, where):
        return max(0.0, machine.gpu_gib * engine.gpu_memory_utilization - taken)
    # Cap it at all sequences, and leave the rest to the learner.
    most = (engine.max_num_seqs + PROBE_SEQUENCES) * _sequence_gib(run, model) + _SPARE_CACHE_GIB
    return max(0.0, min((machine.gpu_gib * _SHARED_FRACTION - taken) / num_engines, most))


def _cache_problems(
    run: RunConfig, model: PreTrainedModel, machine: Machine, needs: Sequence[Need], *, where: str, cache: float
) -> list[str]:
    if cache >= (longest := _sequence_gib(run, model)):
        return []
    problem = f"the KV cache of an engine must hold one sequence of model.max_length ({run.model.max_length} tokens, "
    problem += f"{longest:.2f} GiB), got {cache:.2f} GiB"
    remedy = "generators.engine.kv_cache_gib" if where == HOST else "generators.engine.tensor_parallel_size"
    if _is_shared(needs, where):
        others = sorted((need for need in needs if need.place == where), key=lambda need: -need.gib)
        named = ", ".join(f"{need.process.split()[0]}: {need.cause} {need.gib:.1f}" for need in others)
        problem += f": other needs share {where} of {machine.gpu_gib:.1f} GiB ({named})"
        remedy = f"the number of GPUs, or {_advice(others[0].cause, run.model)}"
    return [f"{problem}: lower model.max_length, or raise {remedy}."]


def _is_shared(needs: Sequence[Need], where: str) -> bool:
    return where != HOST and len({need.process for need in needs if need.place == where}) > 1


def _sequence_gib(run: RunConfig, model: PreTrainedModel) -> float:
    """KV cache of the longest sequence, GiB per device."""
    engine = run.generators.engine
    assert isinstance(engine, VllmEngineConfig)
    width = 1 if "fp8" in engine.kv_cache_dtype else getattr(torch, run.model.dtype).itemsize
    return run.model.max_length * kv_bytes(model, width=width) / engine.num_workers / GIB


def shared_cache_gib(run: RunConfig, *, gpu_gib: float) -> float:
    """KV cache per engine on a shared GPU, GiB. Raises ConfigError if the roles do not fit."""
    plan = make_plan(run, Machine(host_gib=inf, gpus=1, gpu_gib=gpu_gib))
    if plan.problems:
        raise ConfigError(plan.problems[0])
    return min(need.gib for need in plan.needs if need.cause == "KV cache")


def kv_bytes(model: PreTrainedModel, *, width: int) -> int:
    """Bytes per token; linear attention stores none."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [_KV_LAYER_KINDS[0]] * text.num_hidden_layers
    layers = sum(kind in _KV_LAYER_KINDS for kind in kinds)
    if getattr(text, "kv_lora_rank", None):
        return layers * width * (text.kv_lora_rank + text.qk_rope_head_dim)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * layers * width * heads * head_dim


def _num_elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _published_gib(run: RunConfig, model: PreTrainedModel) -> float:
    """Size of the adapter if one is trained, else of the model."""
    elements = _num_elements(model)
    if run.model.lora:
        elements = sum(parameter.numel() for _, parameter in adapter_parameters(model))
    return elements * getattr(torch, run.model.dtype).itemsize / GIB
