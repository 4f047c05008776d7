"""Starts and stops AsyncLLM, without leaving a process behind."""

import asyncio
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from vllm import envs
from vllm.config.profiler import ProfilerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM

from slipstream.configs.base import ConfigError
from slipstream.configs.broker import PROBE_SEQUENCES
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.vllm.health import LoadRecorder, forget_fatal_error, read_fatal_error
from slipstream.generators.engines.vllm.patches import (
    SOCKETS,
    SOCKETS_PREFIX,
    image_arguments,
    record_routed_experts,
    remove_sockets,
)
from slipstream.generators.engines.vllm.weights import VLLM_PROCESSES, WeightWorker, lora_arguments
from slipstream.generators.errors import EngineError, EngineStartError
from slipstream.runtime.images import takes_images
from slipstream.runtime.lora import meta_model
from slipstream.runtime.model_files import end_token_ids
from slipstream.runtime.process import run_in_thread

_STOP_GRACE_S = 1.0
"""Short, because the engine process holds no state worth waiting for."""
_ABANDON_TIMEOUT_S = 5.0
PROFILES = Path(tempfile.gettempdir()) / f"slipstream-profile-{os.getpid()}"
_MAX_TEMPDIR_BYTES = 45
"""The kernel allows 107 bytes for a socket's path."""
# Costs nothing until a profile starts.
_PROFILER = ProfilerConfig(
    profiler="torch",
    torch_profiler_dir=str(PROFILES),
    torch_profiler_with_stack=False,
    torch_profiler_use_gzip=False,
    ignore_frontend=True,
)
_LEAST_SHARE = 0.01


def engine_arguments(
    model: ModelConfig,
    engine: VllmEngineConfig,
    *,
    seed: int,
    max_positions: int,
    reads_text: bool,
    lora_targets: Sequence[str] = (),
) -> AsyncEngineArgs:
    """Raises EngineError for settings that a CPU does not support.

    `lora_targets`: last name component of each layer with an adapter.
    """
    is_cpu, records = current_platform.is_cpu(), model.moe.router_replay
    _check_arguments(engine, is_cpu=is_cpu, records=records)
    if is_cpu and records:
        record_routed_experts()
    has_images = takes_images(model.path)
    return AsyncEngineArgs(
        model=model.path,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        # vLLM requires a tokenizer for images.
        skip_tokenizer_init=not (reads_text or has_images),
        # One extra, because a probe generates a token after its prompt.
        max_model_len=min(model.max_length + 1, max_positions),
        # So that a probe never waits for a response.
        max_num_seqs=engine.max_num_seqs + PROBE_SEQUENCES,
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        enable_expert_parallel=engine.expert_parallel,
        distributed_executor_backend="uni" if engine.num_workers == 1 else "mp",
        enforce_eager=is_cpu if engine.enforce_eager is None else engine.enforce_eager,
        enable_return_routed_experts=records,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        quantization=engine.quantization,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=f"{WeightWorker.__module__}.{WeightWorker.__qualname__}",
        seed=seed,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **_cache_arguments(engine, reads_text=reads_text, records=records),
        **lora_arguments(model.lora, targets=lora_targets),
        **(image_arguments(is_cpu=is_cpu) if has_images else {}),
        # On a CPU, a seeded request with a chunked prompt crashes the engine process: vLLM rewinds the request's random
        # generator, which torch does not support there.
        **({"profiler_config": _PROFILER, "enable_chunked_prefill": False if is_cpu else None} | engine.engine_kwargs),
    )


def _cache_arguments(engine: VllmEngineConfig, *, reads_text: bool, records: bool) -> dict[str, Any]:
    size_gib, caches_prefixes = engine.kv_cache_gib, engine.enable_prefix_caching
    return {
        # With a cache size, vLLM only checks at startup that this share of the GPU is free.
        "gpu_memory_utilization": engine.gpu_memory_utilization if size_gib is None else _LEAST_SHARE,
        "kv_cache_memory_bytes": None if size_gib is None else int(size_gib * 2**30),
        "kv_cache_dtype": engine.kv_cache_dtype,
        # Pays off for multi-turn answers. Required to record experts, which vLLM stores per cached block.
        "enable_prefix_caching": records or (reads_text if caches_prefixes is None else caches_prefixes),
    }


def _check_arguments(engine: VllmEngineConfig, *, is_cpu: bool, records: bool) -> None:
    if is_cpu and engine.engine_kwargs.get("enable_chunked_prefill"):
        raise EngineError(
            "enable_chunked_prefill in generators.engine.engine_kwargs must be false on a CPU, got true: vLLM does not "
            "support seeded requests with chunked prompts there"
        )
    if is_cpu and engine.expert_parallel and engine.tensor_parallel_size > 1:
        raise EngineError(
            "generators.engine.expert_parallel must be false with several workers on a CPU, got true: vLLM's kernel of "
            "experts crashes there"
        )
    if is_cpu and records and engine.enforce_eager is False:
        raise EngineError(
            "generators.engine.enforce_eager must be true on a CPU with model.moe.router_replay, got false: compiled "
            "graphs do not record experts there"
        )


def check_environment(required: Mapping[str, str]) -> None:
    """Raise EngineError unless the environment has these values."""
    if wrong := [name for name, value in required.items() if os.environ.get(name) != value]:
        raise EngineError(
            f"the environment must have the variables of vllm_environment() before vLLM is imported, got {wrong[0]}="
            f"{os.environ.get(wrong[0])!r} instead of {required[wrong[0]]!r} ({len(wrong)} differ): start with "
            "`python -m slipstream.generators`"
        )


class _EngineProcess(ForkServerProcess):
    """Runs in the environment of the process that starts it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        # As PYTHONWARNINGS, which Python reads only at its start.
        warnings.simplefilter("ignore", FutureWarning)
        super().run()


class _EngineContext(ForkServerContext):
    Process = _EngineProcess


def start_fork_server() -> None:
    """Fork a process from which later engine processes are forked, because importing vLLM again takes half of a start.

    Call this after the imports and before this process has threads or sockets, which a fork would share. No-op with
    threads, and on GPUs, where it is untested.
    """
    if not current_platform.is_cpu() or threading.active_count() > 1:
        return
    # Objects that no collection visits stay in shared pages.
    gc.freeze()
    # Like `ForkServer.ensure_running`, but forked.
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.arbitrary_address("AF_UNIX"))  # type: ignore[attr-defined]
        listener.listen()
        if (pid := os.fork()) == 0:
            try:
                os.close(alive_w)
                # Ctrl-C reaches only the process that asked for an engine.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                forkserver.main(listener.detach(), alive_r, [])
            finally:
                os._exit(0)
        gc.unfreeze()
        server: Any = forkserver._forkserver
        server._forkserver_address = listener.getsockname()
    os.close(alive_r)
    server._forkserver_pid, server._forkserver_alive_fd = pid, alive_w
    engine_utils.get_mp_context = _EngineContext


async def start_llm(arguments: AsyncEngineArgs, *, timeout_s: float) -> AsyncLLM:
    """Start vLLM, or stop what has started after `timeout_s`. Raises EngineError."""
    forget_fatal_error()
    own = Path(os.environ.get(SOCKETS, SOCKETS_PREFIX))
    # The folder of a stopped engine may still be named.
    is_unset = own.name.startswith(SOCKETS_PREFIX) and not own.is_dir()
    if is_unset and len(tempfile.gettempdir().encode()) <= _MAX_TEMPDIR_BYTES:
        os.environ[SOCKETS] = tempfile.mkdtemp(prefix=SOCKETS_PREFIX)
    # The constructor blocks, and its thread cannot be canceled.
    starting = asyncio.create_task(asyncio.to_thread(_start, arguments))
    try:
        return await asyncio.wait_for(asyncio.shield(starting), timeout_s)
    except TimeoutError as error:
        await _abandon(starting)
        raise EngineStartError(
            f"vLLM must start within {timeout_s:g} s (see learner.stall.timeout_s), but did not: see the log above, or "
            "raise the limit"
        ) from error
    except asyncio.CancelledError:
        await _abandon(starting)
        raise
    except Exception as error:
        remove_sockets()
        cause = read_fatal_error() or one_line(error)
        raise EngineError(f"vLLM did not start with model.path={arguments.model!r}: {cause}") from error


async def stop_llm(llm: AsyncLLM) -> None:
    """Shut down the engine process, then kill the rest, within seconds."""
    if llm.output_handler:
        # It would log the end of the engine process as an error.
        llm.output_handler.cancel()
    # On a CPU, leaving the process group takes longer than any grace.
    await asyncio.to_thread(llm.shutdown, 0.0 if current_platform.is_cpu() else _STOP_GRACE_S)
    _kill_engine_processes()
    if engine_utils.get_mp_context is _EngineContext:
        # End the fork server; later engine processes are spawned.
        engine_utils.get_mp_context = get_mp_context
        server: Any = forkserver._forkserver
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
        tracker: Any = resource_tracker._resource_tracker
        # It ends only after the engine's last process, so wait in a thread.
        stopping = run_in_thread(tracker._stop, name="stop-tracker")
        with suppress(TimeoutError):
            stopping.result(timeout=_STOP_GRACE_S)
    envs.disable_envs_cache()
    forget_fatal_error()
    remove_sockets()
    shutil.rmtree(PROFILES, ignore_errors=True)


def one_line(error: BaseException) -> str:
    """Shorten a vLLM error to one line of at most 500 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix("Call to collective_rpc method failed: ")[:500]


def _start(arguments: AsyncEngineArgs) -> AsyncLLM:
    # The engine process inherits this signal mask, so that Ctrl-C reaches only this process. The resource tracker must
    # already run, because starting it unblocks SIGINT.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if current_platform.is_cpu():
        # vLLM would inspect a model class in a new process, because the import might initialize a GPU.
        registry._run_in_subprocess = lambda inspect: inspect()
    try:
        llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[LoadRecorder])
        # A request reads a dozen of these variables.
        envs.enable_envs_cache()
        return llm
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


async def _abandon(starting: asyncio.Task[AsyncLLM]) -> None:
    # The constructor fails when its engine process dies.
    _kill_engine_processes()
    with suppress(Exception):
        llm = await asyncio.wait_for(asyncio.shield(starting), _ABANDON_TIMEOUT_S)
        await stop_llm(llm)


def _kill_engine_processes() -> None:
    for process in multiprocessing.active_children():
        if process.name.startswith(VLLM_PROCESSES):
            process.kill()
            process.join(_ABANDON_TIMEOUT_S)


def read_checkpoint(model: ModelConfig) -> tuple[list[int], PreTrainedModel]:
    """End tokens and the learner's module, on the meta device. Raises EngineError, ConfigError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        module = meta_model(model)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise EngineError(f"model.path must hold a transformers checkpoint, got {model.path!r}: {error}") from error
    try:
        generation = GenerationConfig.from_pretrained(model.path)
    except OSError:
        generation = GenerationConfig.from_model_config(module.config)
    return end_token_ids(tokenizer, generation), module
