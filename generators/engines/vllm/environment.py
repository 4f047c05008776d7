"""vllm_environment: what must stand in the environment before vLLM and torch are imported."""

from importlib import metadata
from pathlib import Path

from slipstream.configs.generators import VllmEngineConfig
from slipstream.configs.run import RunConfig

_ALWAYS = {
    # A forked child would share locks and sockets with this process.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore:resource_tracker:UserWarning",
}
_CPU = {
    # A process for each role shares few cores: one thread each, and none that spins while it waits.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_GPU = {
    # Else NCCL's watchdog ends the process when another member of the weight group dies.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def vllm_environment(run: RunConfig, *, device: str | None = None) -> dict[str, str]:
    """Variables for `os.environ`, to be set by the role's __main__; empty when the engine is not vLLM.

    `device` is `cpu` or `cuda`, found out when not given.
    """
    config = run.generators.engine
    return engine_environment(config, device=device) if isinstance(config, VllmEngineConfig) else {}


def engine_environment(config: VllmEngineConfig, *, device: str | None = None) -> dict[str, str]:
    """What VllmEngine.start checks. See `vllm_environment`."""
    if (device or detect_device()) == "cuda":
        return _ALWAYS | _GPU
    return _ALWAYS | _CPU | _cpu_choices(config)


def detect_device() -> str:
    """`cuda` with an NVIDIA device and a vLLM that is not the CPU build, else `cpu`. Imports neither torch nor vLLM."""
    has_device = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    return "cuda" if has_device and not _is_cpu_build() else "cpu"


def _cpu_choices(config: VllmEngineConfig) -> dict[str, str]:
    choices = {"VLLM_CPU_KVCACHE_SPACE": str(config.cpu_kv_cache_gib)}
    if config.enforce_eager:
        # Else the first response waits half a minute while torch compiles a comparison with g++.
        choices["TORCHDYNAMO_DISABLE"] = "1"
    if config.tensor_parallel_size == 1:
        # On a CPU vLLM reads this as "the model may live in the engine process": one process less to start and to feed.
        choices["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return choices


def _is_cpu_build() -> bool:
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return True
