"""Environment variables that must be set before vLLM and torch are imported."""

from importlib import metadata
from math import ceil
from pathlib import Path

from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.runtime.process import NCCL_ENVIRONMENT

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
    # All roles share a few cores: more or spinning threads reduce throughput tenfold.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def vllm_environment(run: RunConfig, *, device: str | None = None) -> dict[str, str]:
    """Variables for the role's __main__ to set; empty unless the engine is vLLM.

    `device`: `cpu` or `cuda`; None detects it.
    """
    config = run.generators.engine
    return engine_environment(config, device=device) if isinstance(config, VllmEngineConfig) else {}


def engine_environment(config: VllmEngineConfig, *, device: str | None = None) -> dict[str, str]:
    """Variables that `VllmEngine.start` requires."""
    if (device or detect_device()) == "cuda":
        return _ALWAYS | NCCL_ENVIRONMENT
    settings = _ALWAYS | _CPU | {"VLLM_CPU_KVCACHE_SPACE": str(ceil(config.kv_cache_gib or 1))}
    if config.enforce_eager is not False:
        # Otherwise torch compiles a comparison with g++ for half a minute.
        settings["TORCHDYNAMO_DISABLE"] = "1"
    if config.num_workers == 1:
        # Saves a process: vLLM runs the model in the engine process.
        settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return settings


def detect_device() -> str:
    """`cuda` if the machine has an NVIDIA device and vLLM is not the CPU build, else `cpu`."""
    # Without torch, which would read the environment.
    has_device = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    try:
        is_cpu_build = "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        is_cpu_build = True
    return "cuda" if has_device and not is_cpu_build else "cpu"
