"""Checks of run inputs: store, model folder, prompts."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from slipstream.broker.dataset import chat_renderer, describe_shortages, find_template
from slipstream.broker.prompt_rows import PromptText
from slipstream.buffer.archive.replay import plan_replay
from slipstream.buffer.redis.connection import await_usable_server, connect
from slipstream.buffer.redis.embedded import find_redis_binary
from slipstream.buffer.redis.run_store import store_url
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.run import RunConfig
from slipstream.launch.diagnose.machine import Result, judge
from slipstream.launch.preflight import missing_steps, read_data
from slipstream.runtime.images import VisionModel
from slipstream.runtime.model_files import TOKENIZER_FILES, check_model_path, find_file, fingerprint, weight_map

_STORE_TIMEOUT_S = 5.0
_MUCH, _FULL = 0.8, 0.95
"""Fractions of the store's memory for a warning and a failure."""
_COPY_AGAIN = "copy or download the folder again, and compare its checksums with the source's"


def check_store(run: RunConfig, folder: Path, *, is_live: bool) -> list[Result]:
    """Query the run's server, an embedded one only during the run. Raises StoreUnavailableError."""
    config = run.buffer.store
    if run.mode == "sft":
        return [Result("store", "skipped", "mode=sft has none")]
    if isinstance(config, EmbeddedRedisConfig) and not (is_live and not run.is_one_process):
        return [Result("store", "ok", f"{find_redis_binary()} starts with the run, durability {config.durability}")]
    url = store_url(run, folder)
    # Also checks its version and maxmemory-policy.
    address = await_usable_server(url, timeout_s=_STORE_TIMEOUT_S)
    with closing(connect(url, answer_timeout_s=_STORE_TIMEOUT_S)) as client:
        return judge_server(client.info(), address=address, is_durable=getattr(config, "durability", "") != "fast")


def judge_server(info: Mapping[str, Any], *, address: str, is_durable: bool) -> list[Result]:
    """Judge the INFO of a server; `is_durable`: data must survive a restart."""
    found = f"Redis {info.get('redis_version')} at {address}"
    server = Result("store", "ok", found)
    if info.get("role", "master") != "master":
        server = Result("store", "fail", f"{found} is a replica", fix="name the primary in buffer.store.url")
    used, limit, total = (int(info.get(key, 0)) for key in ("used_memory", "maxmemory", "total_system_memory"))
    found = f"{used / 2**20:,.0f} MiB of {(limit or total) / 2**20:,.0f} MiB, policy {info.get('maxmemory_policy')}"
    memory = Result("store memory", "ok", found)
    if used > _MUCH * (limit or total) > 0:
        fix = "raise buffer.store.max_memory_mib (maxmemory of an external server), or lower staleness.max_lag"
        memory = Result("store memory", "fail" if used > _FULL * (limit or total) else "warn", found, fix=fix)
    has_log = bool(int(info.get("aof_enabled", 0)))
    disk = Result("store persistence", "ok", "append-only file" if has_log else "none, as durability=fast says")
    if "err" in (info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")):
        fix = "make room on the disk of the server, and see its log"
        disk = Result("store persistence", "fail", "the last write to its disk failed", fix=fix)
    elif is_durable and not has_log:
        fix = "set appendonly yes, appendfsync always and aof-load-truncated no at the server"
        disk = Result("store persistence", "warn", "no append-only file: a restart loses the newest data", fix=fix)
    return [server, memory, disk]


def check_model_folder(run: RunConfig) -> list[Result]:
    """Check config, tokenizer, and weights without loading them. Raises ConfigError."""
    path = run.model.path
    if not Path(path).exists() and any(Path(step.creates) == Path(path) for step in run.prepare):
        return [Result("model", "skipped", f"{path} is not made yet: `slipstream prepare` and every run make it")]
    check_model_path(path)
    if not find_file(path, "config.json"):
        return [Result("model", "skipped", f"{path} is on the hub, and not in its cache yet")]
    known = fingerprint(path)
    if known is None or not known.architectures:
        return [Result("model", "fail", f"config.json of {path} names no architecture, or is damaged", fix=_COPY_AGAIN)]
    found = f"{path}, {known.architectures[0]}, {known.num_parameters or 0:,} parameters"
    return [Result("model", "ok", found), _check_weights(path), _check_tokenizer(path, size=known.vocab_size)]


def _check_weights(path: str) -> Result:
    if not (expected := weight_map(path)):
        if (Path(path) / "pytorch_model.bin").exists():
            fix = "convert them with save_pretrained of transformers: pickled weights can run code"
            return Result("weights", "warn", "pytorch_model.bin and no safetensors", fix=fix)
        return Result("weights", "fail", f"{path} has neither model.safetensors nor its index", fix=_COPY_AGAIN)
    problems, size = [], 0
    for name, tensors in expected.items():
        if not (file := find_file(path, name)):
            problems.append(f"{name} is missing")
            continue
        try:
            # Compares file size and header, without reading tensors.
            with safe_open(file, framework="numpy") as opened:
                lacking = tensors - set(opened.keys())
        except (SafetensorError, OSError) as error:
            problems.append(f"{name} is damaged or cut short ({error})")
            continue
        size += file.stat().st_size
        problems += [f"{name} lacks {len(lacking)} tensors, such as {min(lacking)}"] if lacking else []
    if problems:
        return Result("weights", "fail", "; ".join(problems), fix=_COPY_AGAIN)
    return Result("weights", "ok", f"{len(expected)} safetensors files, {size / 2**20:,.1f} MiB")


def _check_tokenizer(path: str, *, size: int | None) -> Result:
    if not (file := find_file(path, "tokenizer.json")):
        if any(find_file(path, name) for name in TOKENIZER_FILES[1:4]):
            fix = "save it with save_pretrained of transformers: lengths of prompts are unknown without that file"
            return Result("tokenizer", "warn", "no tokenizer.json, but files of an older form", fix=fix)
        return Result("tokenizer", "fail", f"{path} has no tokenizer", fix="copy the tokenizer's files into the folder")
    try:
        tokens = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False)
    except Exception as error:  # the library raises bare Exception
        return Result("tokenizer", "fail", f"{file} is damaged: {error}", fix=_COPY_AGAIN)
    if size is not None and (largest := max(tokens.values(), default=0)) >= size:
        found = f"token {largest} has no embedding: config.json has vocab_size {size}"
        return Result("tokenizer", "fail", found, fix="use the tokenizer of this model, or resize its embedding")
    return Result("tokenizer", "ok", f"{len(tokens):,} tokens")


def check_data(run: RunConfig) -> list[Result]:
    """Read all prompts and try the chat template. Raises ConfigError."""
    if run.mode == "sft":
        return [Result("data", "skipped", "mode=sft reads its demonstrations itself")]
    paths = [file.path for file in run.data.train_files] + [each.path for each in run.data.eval_sets]
    made = {Path(step.creates) for step in missing_steps(run)}
    if absent := [path for path in paths if not Path(path).exists() and {Path(path), *Path(path).parents} & made]:
        return [Result("data", "skipped", f"{absent[0]} is not made yet: `slipstream prepare` and every run make it")]
    train, heldout = read_data(run)
    if run.mode == "replay":
        plan_replay(run)
    sizes = [f"{len(train):,} rows to train on", *(f"{len(rows):,} of {name}" for name, rows in heldout.items())]
    notes = describe_shortages(run, heldout)
    fix = "lower evaluation.num_final_prompts, or use a larger file"
    data = judge("data", not notes, "; ".join([", ".join(sizes), *notes]), fix=fix)
    if not find_file(run.model.path, "config.json"):
        return [data]
    for rows in dict.fromkeys([train, *heldout.values()]):
        for file in rows.files:
            file.check_images(VisionModel(run.model.path))
    return [data, _check_template(run, train.row(0).prompt)]


def _check_template(run: RunConfig, prompt: PromptText) -> Result:
    if isinstance(prompt, str):
        return Result("chat template", "ok", "not needed: prompts are text")
    if not find_template(run.model):
        fix = "name a file with model.chat_template, use an instruction-tuned checkpoint, or write prompts as text"
        return Result("chat template", "fail", f"prompts are messages, and {run.model.path} has no template", fix=fix)
    text = chat_renderer(run.model)(prompt)
    if not text:
        fix = "correct the template (or model.chat_template), or the messages"
        return Result("chat template", "fail", "it does not take the messages of the first prompt", fix=fix)
    return Result("chat template", "ok", f"the first prompt has {len(text)} characters with it")
