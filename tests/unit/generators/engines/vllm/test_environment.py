from slipstream.generators.engines.vllm.environment import vllm_environment
from tests.builders import make_run


def environment_of(device: str, **engine: object) -> dict[str, str]:
    return vllm_environment(make_run(generators={"engine": {"kind": "vllm", **engine}}), device=device)


def test_variables_follow_device_and_settings():
    assert vllm_environment(make_run()) == {}, "for another engine"
    cpu, gpu = environment_of("cpu", kv_cache_gib=3), environment_of("cuda")
    for environment in (cpu, gpu):
        assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == "1"
    assert (cpu["OMP_NUM_THREADS"], cpu["VLLM_CPU_KVCACHE_SPACE"]) == ("1", "3")
    assert not [name for name in gpu if "CPU" in name or "OMP" in name]
    # The model lives in the engine process unless it is split; compiled graphs need the compiler.
    assert (cpu["VLLM_ENABLE_V1_MULTIPROCESSING"], cpu["TORCHDYNAMO_DISABLE"]) == ("0", "1")
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment_of("cpu", tensor_parallel_size=2)
    assert "TORCHDYNAMO_DISABLE" not in environment_of("cpu", enforce_eager=False)
