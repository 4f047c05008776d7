"""Three versions broadcast to real vLLM in another process, on any device; used by tests/gpu/several, too."""

from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.broker.weights.collective import CollectiveReceiver
from slipstream.buffer.trajectory import VersionSpan
from slipstream.configs.engines import Quantization, VllmEngineConfig
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.runtime.process import NCCL_ENVIRONMENT
from tests.contract.engines import Rig, make_sampling, reference_logprobs
from tests.families import make_family, make_family_module
from tests.integration.test_weight_round_trip import Learner, MemberProcess

PROMPT = [6, 10, 4, 3, 5, 12, 7, 8]
START_S = 180.0
LIMIT_S = 60.0
EXACT_NATS = 1e-4
"""Bound of float32 kernels on a CPU, as in tests/contract/test_engine.py."""


class Case(NamedTuple):
    """Case("qwen2", workers=2)"""

    family: str
    workers: int = 1
    quantization: Quantization | None = None
    expert_parallel: bool = False
    dtype: str = "float32"
    device: str = "cpu"


def serve_engine(commands: Connection, folder: Path, case: Case, config: VllmEngineConfig) -> None:
    """A generator's engine and its end of the broadcasts. Answers an update with (tokens, log-probabilities, versions)
    of sampled answers."""
    torch.set_num_threads(1)
    dtype: Any = case.dtype
    rig = Rig("vllm", folder, vllm=config, module=make_family_module(case.family), dtype=dtype)
    receiver = CollectiveReceiver(device=case.device)
    commands.send("here")
    while True:
        try:
            action, options = commands.recv()
        except EOFError:
            break
        if action == "open_epoch":
            receiver.open_epoch(**options)
            commands.send({})
            continue
        update = options["update"]
        received = receiver.receive(update, cancelled=Event())
        rig.run(rig.engine.prepare(update, received))
        rig.run(rig.engine.switch(update))
        answers = rig.run(rig.generate([PROMPT] * 4, [make_sampling(seed) for seed in range(4)]))
        commands.send([(answer.token_ids, answer.logprobs, answer.version_spans) for answer in answers])
    receiver.close()
    rig.close()


def difference(module: Any, answers: list[Any]) -> float:
    """Mean difference of the answers' log-probabilities from the module's, nats."""
    own = [reference_logprobs(module, PROMPT, tokens, make_sampling()) for tokens, _, _ in answers]
    return float(np.abs(np.concatenate(own) - np.concatenate([logprobs for _, logprobs, _ in answers])).mean())


def check_updates(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, *, variables: Mapping[str, str] | None = None
) -> None:
    """Broadcast three versions; after each, the engine samples from its weights and reports their log-probabilities.

    `variables`: of the engine's process.
    """
    on_cpu = case.device == "cpu"
    config = VllmEngineConfig(
        max_num_seqs=8,
        tensor_parallel_size=case.workers,
        quantization=case.quantization,
        expert_parallel=case.expert_parallel,
        kv_cache_gib=0.25,
        enforce_eager=None if on_cpu else False,
    )
    for key, value in NCCL_ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    path = make_family(folder, case.family)
    member = MemberProcess(serve_engine, path, case, config, **(engine_environment(config) | dict(variables or {})))
    learner = Learner([member], device=case.device)
    dtype = getattr(torch, case.dtype)
    try:
        modules = [make_family_module(case.family, seed=seed).to(dtype).float().eval() for seed in range(4)]
        assert member.answer(timeout_s=START_S) == "here"
        learner.open_epoch(1, [member])
        for version, module in enumerate(modules[1:]):
            rounded = [(name, each.to(dtype)) for name, each in module.state_dict().items()]
            learner.hold(dict(CheckpointNames(module).convert(rounded)))
            learner.start_receiving([member], timeout_s=LIMIT_S, version=version)
            learner.sender.broadcast(learner.packed, timeout_s=LIMIT_S)
            answers = member.answer(timeout_s=LIMIT_S)
            assert [spans for _, _, spans in answers] == [[VersionSpan(0, version)]] * 4
            own, former = difference(module, answers), difference(modules[version], answers)
            print(f"version {version}: {own:.2g} nats from its weights, {former:.2g} from the former ones")
            # Rounding, also of quantized weights, is far smaller than what other random weights change.
            assert own < 0.3 * former
            assert own < EXACT_NATS or case.dtype != "float32" or not on_cpu
    finally:
        learner.sender.close()
        member.end()
