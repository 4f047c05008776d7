"""VllmEngine beyond the contract of all engines: tied embeddings, late answers, and dead and orphaned processes."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights.transport import HostBuckets
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.generators.errors import EngineDiedError, EngineError, UnverifiedWeightsError
from tests.contract.engines import VLLM_CONFIG, Rig, engine_processes, make_sampling, reference_logits, started
from tests.tiny_model import make_tiny_model, make_tiny_module

pytestmark = pytest.mark.slow

PROMPT = [6, 10, 4, 3, 5, 12]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with started("vllm", tmp_path_factory.mktemp("tied"), is_tied=True) as opened:
        yield opened


def probe_diff(rig: Rig, prompt: list[int] = PROMPT) -> float:
    """Largest difference of prompt log-probabilities between the engine and the expected module."""
    logprobs = reference_logits(rig.module, prompt).log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return (torch.tensor(rig.run(rig.engine.prompt_logprobs(prompt))) - expected).abs().max().item()


def publish_next(rig: Rig, *, seed: int) -> None:
    rig.run(rig.publish(make_tiny_module(seed=seed, is_tied=rig.is_tied), version=rig.engine.version + 1))


def test_updates_reach_the_tied_head(tied: Rig):
    assert probe_diff(tied) < 1e-4
    for seed in (1, 2, 3):
        publish_next(tied, seed=seed)
        assert probe_diff(tied) < 1e-4
    # As long as the longest trajectory.
    assert probe_diff(tied, [2 + i % 30 for i in range(112)]) < 1e-4


def test_an_update_answered_too_late_does_not_block_the_next(tied: Rig, monkeypatch: pytest.MonkeyPatch):
    llm, version = tied.engine._llm, tied.engine.version
    call = llm.collective_rpc

    async def late(method: str, *arguments: Any, **named: Any) -> Any:
        answer = await call(method, *arguments, **named)
        if method == "switch_weights":
            raise TimeoutError
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(llm, "collective_rpc", late)
        with pytest.raises(UnverifiedWeightsError, match="it was not: vLLM's engine process must answer"):
            publish_next(tied, seed=10)
    tied.run(tied.publish(make_tiny_module(seed=11, is_tied=True), version=version + 2))
    assert probe_diff(tied) < 1e-4


def test_an_engine_that_does_not_answer_a_pause_is_dead(tied: Rig, monkeypatch: pytest.MonkeyPatch):
    async def never(**_: Any) -> None:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(tied.engine._llm.engine_core, "pause_scheduler_async", never)
        with pytest.raises(EngineError, match="got no answer"):
            publish_next(tied, seed=12)
    with pytest.raises(EngineDiedError, match="got no answer"):
        tied.run(tied.engine.check_health())
    publish_next(tied, seed=12)
    tied.run(tied.engine.check_health())


def test_an_update_completes_although_its_caller_is_cancelled(tied: Rig):
    version = tied.engine.version + 1

    async def scenario() -> None:
        update, memory = tied.announce(make_tiny_module(seed=9, is_tied=True), version=version)
        await tied.engine.prepare(update, HostBuckets(memory.tensors, memory.path))
        switching = asyncio.create_task(tied.engine.switch(update))
        # Enough turns of the loop for the switch to start.
        for _ in range(3):
            await asyncio.sleep(0)
        switching.cancel()
        await asyncio.gather(switching, return_exceptions=True)
        deadline = time.monotonic() + 30
        while tied.engine.version != version:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert await tied.generate([PROMPT], [make_sampling()])

    tied.run(scenario())


def test_a_dead_engine_process_fails_every_open_request(tied: Rig):
    async def scenario() -> list[Any]:
        engine, samplings = tied.engine, [make_sampling(seed, max_tokens=100) for seed in range(40)]
        requests = [asyncio.create_task(engine.generate(PROMPT, s, request_id=f"open-{s.seed}")) for s in samplings]
        await asyncio.sleep(0.02)
        for child in engine_processes():
            child.kill()
        return await asyncio.gather(*requests, return_exceptions=True)

    outcomes = tied.run(scenario())
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert errors
    assert all(isinstance(error, EngineError) for error in errors)
    with pytest.raises(EngineError, match="engine process died"):
        tied.run(tied.engine.check_health())
    started = time.monotonic()
    tied.run(tied.engine.stop())
    assert time.monotonic() - started < 10


def test_a_failed_start_is_an_error_that_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from slipstream.generators.engines.vllm.engine import VllmEngine

    def start() -> None:
        model = ModelConfig(max_length=64, dtype="float32", path=str(tmp_path))
        asyncio.run(VllmEngine(model, VLLM_CONFIG, seed=0, stall_timeout_s=1.0).start())

    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    with pytest.raises(EngineError, match="environment must have the variables of vllm_environment"):
        start()
    for name, value in engine_environment(VLLM_CONFIG).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=r"model\.path must hold a transformers checkpoint"):
        start()
    make_tiny_model(tmp_path)
    with pytest.raises(EngineError, match=r"within 3 s"):
        start()
    assert engine_processes() == []


@contextmanager
def session(kind: str, folder: Path, *, temporary: Path) -> Iterator[Any]:
    """A role with an engine, in its own process group."""
    command = [sys.executable, "-m", "tests.e2e.engine_session", str(make_tiny_model(folder)), kind]
    pipe, environment = subprocess.PIPE, os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, process_group=0, env=environment
    ) as role:
        try:
            yield role
        finally:
            role.kill()


# Generators fork it.
@pytest.mark.parametrize("kind", [pytest.param("spawned", marks=pytest.mark.long), "forked"])
def test_the_engine_process_has_the_environment_of_its_role_ignores_ctrl_c_and_dies_with_it(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
):
    # Short, as for paths of sockets.
    temporary = Path(tempfile.mkdtemp(prefix="engine-"))
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    with session(kind, tmp_path, temporary=temporary) as role:
        if kind == "forked":
            assert json.loads(role.stdout.readline()) == {"late": "set after the fork"}
        engine = [psutil.Process(pid) for pid in json.loads(role.stdout.readline())["pids"]]
        if kind == "forked":
            server, *others = engine
            forked = next(each for each in others if each.ppid() == server.pid)
            assert forked.cmdline() == server.cmdline() == psutil.Process(role.pid).cmdline()
        os.killpg(role.pid, signal.SIGINT)
        role.stdin.write("after-ctrl-c\n")
        role.stdin.flush()
        assert json.loads(role.stdout.readline())["tokens"]
        role.kill()
        role.wait(5)
        _, alive = psutil.wait_procs(engine, timeout=5)
        assert alive == []
        assert [path for path in temporary.iterdir() if "vllm" in path.name] == []
        assert "Traceback" not in role.stderr.read()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_engine_of_two_workers_is_one_member_of_broadcasts(
    kind: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # In eager mode, vLLM's CPU worker lacks the buffers between pipeline stages.
    config = VllmEngineConfig(max_num_seqs=64, enforce_eager=kind == "tensor", **{f"{kind}_parallel_size": 2})
    for variable in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    with started("vllm", tmp_path, is_tied=is_tied, vllm=config) as rig:
        for seed in (1, 2, 3):
            publish_next(rig, seed=seed)
            assert probe_diff(rig) < 1e-4
        with pytest.raises(WeightTransferError, match="checksum"):
            rig.run(rig.publish(make_tiny_module(seed=9, is_tied=is_tied), version=3, is_corrupted=True))
        assert probe_diff(rig) < 1e-4
        publish_next(rig, seed=9)
        assert probe_diff(rig) < 1e-4
