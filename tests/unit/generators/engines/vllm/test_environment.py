from slipstream.generators.engines.vllm.environment import vllm_environment
from tests.builders import make_run


def environment_of(device: str, **engine: object) -> dict[str, str]:
    return vllm_environment(make_run(generators={"engine": {"kind": "vllm", **engine}}), device=device)


def test_other_engines_need_no_variables():
    assert vllm_environment(make_run()) == {}


def test_vllm_sends_no_usage_statistics():
    for device in ("cpu", "cuda"):
        environment = environment_of(device)
        assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == "1"


def test_a_cpu_engine_has_one_thread_and_the_configured_memory():
    environment = environment_of("cpu", cpu_kv_cache_gib=3)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_the_model_lives_in_the_engine_process_without_tensor_parallelism():
    assert environment_of("cpu")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment_of("cpu", tensor_parallel_size=2)


def test_compiled_graphs_need_the_compiler():
    assert environment_of("cpu")["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment_of("cpu", enforce_eager=False)


def test_no_cpu_variable_is_set_for_a_gpu():
    assert not [name for name in environment_of("cuda") if "CPU" in name or "OMP" in name]
