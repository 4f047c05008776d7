"""Faults planted into weight updates of a real vLLM engine: the check that catches each, before or after loading.

The model has a tied head. Before every fault a good version is applied. The faulty version differs from it by 1e-5 in
every weight, as after an optimizer step. Then a good version must heal the engine. The generator's error message shows
which check caught the fault.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from torch import Tensor
from transformers import Qwen2ForCausalLM

from benchmarks.harness import make_parser, make_table, write_result
from benchmarks.weights.engine_and_learner import (
    MEMBER,
    EngineAndLearner,
    SetVariable,
    Tensors,
    announce,
    make_module,
    prompt_logprobs,
    tensors_of,
)
from slipstream.broker.messages import TensorSlot, Update, UpdateApplied
from slipstream.broker.weights.collective import CollectiveReceiver
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.weight_updates import WeightUpdates

_BUCKET_BYTES = 40_000
_STEP = 1e-5
"""Change of every weight in a faulty update: that of an optimizer step, too small for a probe to detect."""
_LARGE_STEP = 0.1
"""Change of every weight between good versions: large enough for a probe to detect."""
_PROMPT = [4, 7, 3, 9, 12, 5, 8, 2]
_NORM, _MATRIX = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"
_OTHER_NORM, _OTHER_MATRIX = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.gate_proj.weight"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_CHECKS = {
    "must be sent": "layout: names",
    "must belong to": "layout: names",
    "in the model's order": "layout: order of names",
    "must have the engine's dtype": "layout: dtype",
    "checksum": "checksum of the bucket",
    "kept their old values": "report of the loaded parameters",
    "could not load it": "the engine's loader",
    "as sent, but": "verification of the loaded model",
    "agree with the learner's": "probe",
}
"""Phrase of an error message -> the check that raises it."""

console = Console(highlight=False)


@dataclass(frozen=True)
class Fault:
    """One way for an update to go wrong. Exactly one of `sent`, `announced`, `transit`, `worker` plants it."""

    name: str
    caught_by: str
    """Expected check, a value of _CHECKS."""
    is_loaded: bool = False
    """Whether it can be detected only after the engine's weights have changed."""
    sent: Callable[[Tensors, dict[str, Tensor]], Tensors] | None = None
    """(new tensors, previous tensors) -> tensors that the learner packs."""
    announced: Callable[[list[TensorSlot]], list[TensorSlot]] | None = None
    """Packed layout -> announced layout."""
    transit: Callable[[list[Tensor], list[Tensor]], None] | None = None
    """Changes the buckets in transit, given those of the previous version."""
    worker: Callable[[Any], None] | None = None
    """Makes the engine's worker load incorrectly, once."""


@dataclass(frozen=True)
class Outcome:
    """Result of a faulty update and of the good update after it."""

    error: str
    """Generator's answer to the faulty update."""
    caught_by: str
    """Check that caught it, a value of _CHECKS."""
    is_loaded: bool
    """Whether the engine's weights changed."""
    is_verified: bool
    """Whether trajectories of the previous version could still be sent."""
    states: list[str]
    """Generator states since the faulty update."""
    seconds: float
    """From the command to the answer."""
    is_healed: bool
    """Whether the next good update was verified and the engine's log-probabilities are correct."""


def _swapped(slots: list[TensorSlot], one: str, other: str) -> list[TensorSlot]:
    names = {one: other, other: one}
    return [msgspec.structs.replace(slot, name=names.get(slot.name, slot.name)) for slot in slots]


def _exchanged(tensors: Tensors, one: str, other: str) -> Tensors:
    values = dict(tensors)
    values[one], values[other] = values[other], values[one]
    return [(name, values[name]) for name, _ in tensors]


def _without(tensors: Tensors, left_out: str) -> Tensors:
    return [(name, tensor) for name, tensor in tensors if name != left_out]


def _flip_bit(packed: list[Tensor], _: list[Tensor]) -> None:
    packed[-1][17] ^= 1


def _send_old_bucket(packed: list[Tensor], old: list[Tensor]) -> None:
    packed[1].copy_(old[1])


def _once(worker: Any, corrupt: Callable[[Callable[[Any], Any], Tensors], Any]) -> None:
    """Replace the worker's next load by `corrupt(load, tensors)`."""
    versions = worker._versions
    load = versions._load_recorded

    def load_once(model: Any, tensors: Tensors) -> Any:
        versions._load_recorded = load
        return corrupt(partial(load, model), tensors)

    versions._load_recorded = load_once


def _leave_out(worker: Any) -> None:
    _once(worker, lambda load, tensors: load(_without(tensors, _NORM)))


def _load_another(worker: Any) -> None:
    _once(worker, lambda load, tensors: load([(n, t + 1e-6 if n == _NORM else t) for n, t in tensors]))


def _fail_halfway(worker: Any) -> None:
    def half(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        yield from tensors[: len(tensors) // 2]
        raise ValueError("planted")

    _once(worker, lambda load, tensors: load(half(tensors)))


def _keep_head_kernel(worker: Any) -> None:
    head = worker._versions._second.lm_head
    kernel = head.cpu_linear

    def corrupt(load: Callable[[Any], Any], tensors: Tensors) -> Any:
        loaded = load(tensors)
        head.cpu_linear = kernel
        return loaded

    _once(worker, corrupt)


FAULTS = [
    Fault("a matrix is not sent", "layout: names", sent=lambda new, _: _without(new, _MATRIX)),
    Fault("a norm is not sent", "layout: names", sent=lambda new, _: _without(new, _NORM)),
    Fault(
        "two names are swapped, same shape",
        "layout: order of names",
        announced=lambda slots: _swapped(slots, _NORM, _OTHER_NORM),
    ),
    Fault(
        "two matrices are packed under each other's name",
        "probe",
        is_loaded=True,
        sent=lambda new, _: _exchanged(new, _MATRIX, _OTHER_MATRIX),
    ),
    Fault(
        "the tied head is sent beside the embedding",
        "layout: names",
        sent=lambda new, _: [*new, (_HEAD, dict(new)[_EMBEDDING])],
    ),
    Fault(
        "the head's kernel keeps the old weights",
        "verification of the loaded model",
        worker=_keep_head_kernel,
    ),
    Fault("the engine's loader leaves a norm out", "report of the loaded parameters", worker=_leave_out),
    Fault(
        "the engine's loader writes a wrong value",
        "verification of the loaded model",
        worker=_load_another,
    ),
    Fault("the engine's loader fails halfway", "the engine's loader", worker=_fail_halfway),
    Fault("one bit flips in transit", "checksum of the bucket", transit=_flip_bit),
    Fault("a bucket of the previous version arrives", "checksum of the bucket", transit=_send_old_bucket),
    Fault(
        "weights travel in another dtype than the engine's",
        "layout: dtype",
        sent=lambda new, _: [(name, tensor.bfloat16()) for name, tensor in new],
    ),
    Fault(
        "weights are cast to bfloat16 and back",
        "probe",
        is_loaded=True,
        sent=lambda new, _: [(name, tensor.bfloat16().float()) for name, tensor in new],
    ),
]


class PlantedFaults:
    """A generator's WeightUpdates over a real engine, and a learner that makes mistakes."""

    def __init__(self, folder: Path, *, set_variable: SetVariable = os.environ.__setitem__) -> None:
        # Worker faults are sent to the engine process as functions.
        set_variable("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        module, config = make_module(is_tied=True), VllmEngineConfig(max_num_seqs=64)
        self.rig = EngineAndLearner(folder, module=module, config=config, set_variable=set_variable)
        self.states: list[str] = []
        self._module = module
        self._packed: list[Tensor] = []
        self._version = -1
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._updates = WeightUpdates(
            member=MEMBER,
            client=self,  # type: ignore[arg-type]
            engine=self.rig.engine,
            set_state=lambda state, _: self.states.append(state),
            release=self._release,
            receiver=CollectiveReceiver(device="cpu"),
        )
        self._updating = self.rig.run(self._begin())

    def close(self) -> None:
        self._updating.cancel()
        self.rig.close()

    def send(self, message: Any) -> None:
        """Receive the generator's answers, in place of the broker."""
        self._answers.put_nowait(message)

    def run(self, fault: Fault) -> Outcome:
        """Apply a good update, the faulty one, and another good one."""
        return self.rig.run(self._run(fault))

    async def _begin(self) -> asyncio.Task[None]:
        running = asyncio.create_task(self._updates.run())
        return running

    async def _run(self, fault: Fault) -> Outcome:
        await self._publish(self._moved(_LARGE_STEP))
        before = self._version
        self.states.clear()
        started_at = time.perf_counter()
        answer = await self._publish(self._moved(_STEP), fault)
        seconds = time.perf_counter() - started_at
        states, is_verified = list(self.states), self._updates.is_verified.is_set()
        is_loaded = self.rig.engine.version != before
        healing = await self._publish(self._moved(_LARGE_STEP))
        is_healed = not healing.error and self._updates.is_verified.is_set()
        ours, theirs = await self.rig.engine.prompt_logprobs(_PROMPT), prompt_logprobs(self._module, _PROMPT)
        is_healed = is_healed and max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
        checks = [check for phrase, check in _CHECKS.items() if phrase in answer.error]
        caught_by = next(iter(checks), answer.error or "nothing")
        return Outcome(answer.error, caught_by, is_loaded, is_verified, states, seconds, is_healed)

    async def _publish(self, module: Qwen2ForCausalLM, fault: Fault | None = None) -> UpdateApplied:
        """Publish the module's weights as the next version, with the fault planted."""
        self._version += 1
        update, memory = self._pack(module, fault)
        if fault and fault.worker:
            await self.rig.engine._running.collective_rpc(fault.worker)
        self._updates.submit(update)
        answer = await self._answers.get()
        if fault is None:
            self._packed = memory.tensors
        self._module = module
        return answer

    def _pack(self, module: Qwen2ForCausalLM, fault: Fault | None) -> tuple[Update, SharedBuckets]:
        tensors = tensors_of(module)
        if fault and fault.sent:
            tensors = fault.sent(tensors, dict(tensors_of(self._module)))
        update, memory = announce(tensors, module=module, version=self._version, bucket_bytes=_BUCKET_BYTES)
        if fault and fault.announced:
            update = msgspec.structs.replace(update, slots=fault.announced(update.slots))
        if fault and fault.transit:
            fault.transit(memory.tensors, self._packed)
        return update, memory

    def _moved(self, distance: float) -> Qwen2ForCausalLM:
        module = make_module(is_tied=True)
        module.load_state_dict(self._module.state_dict())
        generator = torch.Generator().manual_seed(self._version + 1)
        for parameter in module.parameters():
            parameter.add_(distance * torch.randn(parameter.shape, generator=generator).sign())
        return module

    async def _release(self, _: str) -> None:
        self.states.append("released")


def main(arguments: argparse.Namespace) -> None:
    """Plant all faults and print which check caught each."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        scene = PlantedFaults(Path(folder) / "model")
        try:
            outcomes = {}
            for fault in FAULTS[: arguments.faults]:
                outcomes[fault.name] = scene.run(fault)
                write_result(arguments, {"faults": msgspec.to_builtins(outcomes)})
        finally:
            scene.close()
    rows = [{"fault": name} | msgspec.to_builtins(outcome) for name, outcome in outcomes.items()]
    columns = {"fault": "{fault}", "caught by": "{caught_by}", "after the load": "{is_loaded}"}
    columns |= {"previous version still verified": "{is_verified}", "healed": "{is_healed}", "s": "{seconds:.3f}"}
    console.print(make_table(rows, columns, title="Planted faults, real vLLM"))


if __name__ == "__main__":
    parser = make_parser("benchmarks.weights.planted_faults", __doc__)
    parser.add_argument("--faults", type=int, help="plant only the first N faults (all)")
    main(parser.parse_args())
