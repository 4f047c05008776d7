import asyncio
import logging
import multiprocessing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from slipstream.configs import engines
from slipstream.configs.base import ConfigError
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.engine import EngineLoad
from slipstream.generators.engines.vllm.engine import VllmEngine
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.generators.engines.vllm.health import (
    StepWatchdog,
    forget_fatal_error,
    read_fatal_error,
    report_fatal_errors,
)
from slipstream.generators.engines.vllm.process import engine_arguments
from slipstream.generators.errors import EngineDiedError, EngineError
from tests.builders import make_run
from tests.cases import cases
from tests.unit.broker.weight_versions import announce

MODEL = ModelConfig(max_length=64, dtype="float32", path="none")


async def never() -> None:
    await asyncio.Event().wait()


def test_an_engine_that_left_one_call_unanswered_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Five calls of half a minute each would outlast the learner's patience with a run without weights.
    monkeypatch.setattr("slipstream.generators.engines.vllm.engine._SECOND_CHANCE_S", 0.01)
    engine = VllmEngine(MODEL, VllmEngineConfig(), seed=0)

    async def scenario() -> None:
        for limit_s in (0.02, 60.0, 60.0):
            with pytest.raises(EngineError, match=r"within 0\.02 s"):
                await engine._call(never(), timeout_s=limit_s)
        # An answer shows that it was only late.
        assert await engine._call(asyncio.sleep(0, 3)) == 3
        with pytest.raises(EngineError, match=r"within 0\.5 s"):
            await engine._call(never(), timeout_s=0.5)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_the_time_to_load_a_version_depends_on_its_size_and_a_given_cache_not_on_free_memory():
    limits = [
        VllmEngine(MODEL, VllmEngineConfig(tensor_parallel_size=workers), seed=0)._loading_s(announce([], sizes, []))
        for workers, sizes in ((1, []), (1, [10**9] * 65), (2, [10**9] * 65))
    ]
    # 65 GB at 100 MB/s, the slowest rate that is no hang.
    assert (limits[1] - limits[0], limits[2] - limits[0]) == (pytest.approx(650), pytest.approx(325))
    measured, given = arguments_of(), arguments_of(kv_cache_gib=1.5)
    assert (measured.gpu_memory_utilization, measured.kv_cache_memory_bytes) == (0.85, None)
    # vLLM starts only where that share of the GPU is free, which another role may have taken.
    assert (given.gpu_memory_utilization, given.kv_cache_memory_bytes) == (0.01, 3 * 2**29)


def arguments_of(*, reads_text: bool = False, **settings: Any) -> AsyncEngineArgs:
    config = VllmEngineConfig(**settings)
    return engine_arguments(MODEL, config, seed=0, max_positions=64, reads_text=reads_text)


@pytest.mark.parametrize(("chosen", "text", "is_on"), [(None, True, True), (None, False, False), (False, True, False)])
def test_prefixes_are_cached_where_an_answer_may_have_several_turns(chosen: bool | None, text: bool, is_on: bool):
    assert arguments_of(enable_prefix_caching=chosen, reads_text=text).enable_prefix_caching is is_on


def test_what_a_cpu_cannot_do_is_refused() -> None:
    with pytest.raises(EngineError, match=r"enable_chunked_prefill .* must be false on a CPU"):
        arguments_of(engine_kwargs={"enable_chunked_prefill": True})
    with pytest.raises(EngineError, match=r"expert_parallel must be false with several workers on a CPU"):
        arguments_of(expert_parallel=True, tensor_parallel_size=2)


def test_settings_reach_vllm_and_so_do_its_other_arguments() -> None:
    compilation = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 64, 256]}
    settings = {"pipeline_parallel_size": 2, "expert_parallel": True, "max_num_batched_tokens": 512}
    settings |= {"kv_cache_dtype": "fp8", "quantization": "fp8_per_tensor"}
    others = {"block_size": 32, "async_scheduling": False, "compilation_config": compilation}
    arguments = arguments_of(**settings, engine_kwargs=others)
    assert arguments.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert (arguments.pipeline_parallel_size, arguments.enable_expert_parallel) == (2, True)
    assert (arguments.max_num_batched_tokens, arguments.kv_cache_dtype) == (512, "fp8")
    assert (arguments.quantization, arguments.distributed_executor_backend) == ("fp8_per_tensor", "mp")
    assert (arguments.block_size, arguments.async_scheduling) == (32, False)
    with pytest.raises(EngineError, match=r"enable_chunked_prefill .* must be false on a CPU"):
        arguments_of(engine_kwargs={"enable_chunked_prefill": True})
    with pytest.raises(EngineError, match=r"expert_parallel must be false with several workers on a CPU"):
        arguments_of(expert_parallel=True, tensor_parallel_size=2)


@cases(
    "extra, advice",
    ({"max_model_len": 9}, r"got max_model_len: set model\.max_length instead"),
    ({"data_parallel_size": 2}, r"set generators\.count instead"),
    ({"logprobs_mode": "raw_logits"}, r"log-probabilities exact, got logprobs_mode: leave it out"),
    ({"speculative_config": {"method": "ngram"}}, r"got speculative_config: leave it out"),
    ({"hf_overrides": {"rope_theta": 1.0}}, r"got hf_overrides: leave it out"),
    ({"blok_size": 32}, r"got blok_size: did you mean block_size\?"),
)
def test_an_argument_that_a_setting_decides_or_that_may_change_sampling_is_refused(extra: dict, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        VllmEngineConfig(engine_kwargs=extra)


def test_every_argument_that_is_named_is_one_of_vllms() -> None:
    names, by_others = {each.name for each in fields(AsyncEngineArgs)}, set(engines._SET_BY_OTHERS)
    assert names >= engines.SAFE_ARGUMENTS | by_others
    defaults = AsyncEngineArgs(model="none")
    # Fails for an argument that is set twice.
    assert arguments_of(engine_kwargs={name: getattr(defaults, name) for name in engines.SAFE_ARGUMENTS})


def environment_of(device: str, **engine: object) -> dict[str, str]:
    return vllm_environment(make_run(generators={"engine": {"kind": "vllm", **engine}}), device=device)


def test_variables_follow_device_and_settings():
    assert vllm_environment(make_run()) == {}, "for another engine"
    cpu, gpu = environment_of("cpu", kv_cache_gib=3), environment_of("cuda")
    for environment in (cpu, gpu):
        assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == "1"
    assert (cpu["OMP_NUM_THREADS"], cpu["VLLM_CPU_KVCACHE_SPACE"]) == ("1", "3")
    assert not [name for name in gpu if "CPU" in name or "OMP" in name]
    assert gpu["TORCH_NCCL_ENABLE_MONITORING"] == gpu["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert not [name for name in cpu if "NCCL" in name]
    # The model lives in the engine process unless it is split; compiled graphs need the compiler.
    assert (cpu["VLLM_ENABLE_V1_MULTIPROCESSING"], cpu["TORCHDYNAMO_DISABLE"]) == ("0", "1")
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment_of("cpu", tensor_parallel_size=2)
    assert "TORCHDYNAMO_DISABLE" not in environment_of("cpu", enforce_eager=False)


@pytest.mark.parametrize("idle", [{"requests": 0}, {"is_paused": True}])
def test_an_engine_without_a_step_while_requests_are_open_is_dead_and_time_without_work_does_not_count(idle):
    now = 0.0
    watchdog = StepWatchdog(limit_s=10.0, clock=lambda: now)

    def check(after_s: float, *, steps: int, requests: int = 1, is_paused: bool = False) -> None:
        nonlocal now
        now += after_s
        watchdog.check(EngineLoad(num_open=requests, num_steps=steps), is_paused=is_paused)

    for step in range(20):
        check(9.0, steps=step)
    check(9.0, steps=19)
    check(100.0, steps=19, **idle)
    check(10.0, steps=19)
    with pytest.raises(EngineDiedError, match=r"within 10 s .* 64 open"):
        check(0.1, steps=19, requests=64)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    forget_fatal_error()
    yield
    forget_fatal_error()


def fail() -> None:
    """As vLLM does it: an error that is answered, the one that ends the process, and a consequence of that."""
    report_fatal_errors()
    engine = logging.getLogger("vllm.v1.engine.core")
    errors = {
        "Invocation of %s method failed": TimeoutError("answered"),
        "EngineCore encountered a fatal error.": RuntimeError("Unsupported CPU attention\nconfiguration: head_dim=16"),
        "EngineCore failed to start.": ValueError("a consequence"),
    }
    for message, error in errors.items():
        try:
            raise error
        except Exception:
            engine.exception(message, *["x"][: message.count("%s")])


def test_the_first_fatal_error_is_the_cause():
    assert read_fatal_error() == ""
    # Forked, because a spawned process would import vLLM again.
    process = multiprocessing.get_context("fork").Process(target=fail, name="EngineCore_0")
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert read_fatal_error() == "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    forget_fatal_error()
    assert read_fatal_error() == ""
