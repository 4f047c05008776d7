"""Three versions, each broadcast to real vLLM while it holds requests' graphs: one worker, two, FP8, experts."""

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
from tests.gpu.device import DEVICE, IS_SMALL
from tests.gpu.several.gpus import take_gpus
from tests.integration.test_weight_round_trip import Learner, MemberProcess

pytestmark = [pytest.mark.own_process, pytest.mark.timeout(200)]

PROMPT = [6, 10, 4, 3, 5, 12, 7, 8]
START_S = 180.0
LIMIT_S = 60.0
DTYPE = torch.float32 if IS_SMALL else torch.bfloat16


class Case(NamedTuple):
    """Case("qwen2", workers=2)"""

    family: str
    workers: int = 1
    quantization: Quantization | None = None
    expert_parallel: bool = False


CASES = {
    "one worker": Case("qwen2"),
    "two workers": Case("qwen2", workers=2),
    "fp8": Case("qwen2", quantization="fp8"),
    "experts": Case("qwen3_moe"),
    "experts on two workers": Case("qwen3_moe", workers=2, expert_parallel=True),
}


def serve_engine(commands: Connection, folder: Path, case: Case, config: VllmEngineConfig) -> None:
    """A generator's engine and its end of the broadcasts. Answers an update with (tokens, log-probabilities, versions)
    of sampled answers."""
    torch.set_num_threads(1)
    dtype: Any = str(DTYPE).removeprefix("torch.")
    rig = Rig("vllm", folder, vllm=config, module=make_family_module(case.family), dtype=dtype)
    receiver = CollectiveReceiver(device=DEVICE.type)
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


@pytest.mark.parametrize("name", CASES)
def test_an_engine_generates_with_each_of_three_broadcast_versions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if IS_SMALL and (case.quantization or case.expert_parallel):
        pytest.skip(
            "vLLM's CPU build has no quantization at updates, and its kernel of experts crashes with parts of them"
        )
    (place,) = take_gpus(case.workers)
    config = VllmEngineConfig(
        max_num_seqs=8,
        tensor_parallel_size=case.workers,
        quantization=case.quantization,
        expert_parallel=case.expert_parallel,
        kv_cache_gib=0.25,
        enforce_eager=None if IS_SMALL else False,
    )
    for key, value in NCCL_ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    variables = engine_environment(config) | place
    folder = make_family(tmp_path, case.family)
    member = MemberProcess(serve_engine, folder, case, config, **variables)
    learner = Learner([member], device=DEVICE.type)
    try:
        modules = [make_family_module(case.family, seed=seed).to(DTYPE).float().eval() for seed in range(4)]
        assert member.answer(timeout_s=START_S) == "here"
        learner.open_epoch(1, [member])
        for version, module in enumerate(modules[1:]):
            names = CheckpointNames(module)
            converted = dict(names.convert((key, each.to(DTYPE)) for key, each in module.state_dict().items()))
            learner.hold(converted)
            learner.start_receiving([member], timeout_s=LIMIT_S, version=version)
            learner.sender.broadcast(learner.packed, timeout_s=LIMIT_S)
            answers = member.answer(timeout_s=LIMIT_S)
            assert [spans for _, _, spans in answers] == [[VersionSpan(0, version)]] * 4
            # Rounding, also of quantized weights, is far smaller than what other random weights change.
            own, former = difference(module, answers), difference(modules[version], answers)
            print(f"version {version}: {own:.2g} nats from its weights, {former:.2g} from the former ones")
            assert own < 0.3 * former
            assert own < 1e-4 or not IS_SMALL
    finally:
        learner.sender.close()
        member.end()
