"""Faults planted into weight updates of a real vLLM engine: what catches each, and when.

python -m benchmarks.weights.planted_faults [--out FILE.json]

A model with a tied head. Before every fault a good version is adopted; the faulty one moves every weight from there by
1e-5 alone, as an optimizer step does; then a good one must heal the engine. What catches a fault is read off the
generator's own answer.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen2ForCausalLM

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
from slipstream.broker.messages import Update, UpdateApplied
from slipstream.broker.weights.records import TensorSlot
from slipstream.configs.generators import VllmEngineConfig
from slipstream.generators.weight_updates import WeightUpdates

_BUCKET_BYTES = 40_000
_STEP = 1e-5
"""What an optimizer step moves every weight by."""
_LEAP = 0.1
"""From one good version to the next: a probe sees it."""
_PROMPT = [4, 7, 3, 9, 12, 5, 8, 2]
_NORM, _MATRIX = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"
_OTHER_NORM, _OTHER_MATRIX = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.gate_proj.weight"
_HEAD = "lm_head.weight"

_CATCHERS = {
    "one of them was not updated": "ties: names of one tensor, same bytes",
    "must be sent": "layout: names",
    "in the model's order": "layout: order of names",
    "must travel as": "layout: dtype",
    "checksum": "checksum of the bucket",
    "kept their old values": "what the engine says it loaded",
    "could not load them": "the engine's loader itself",
    "as it was sent": "reading back",
    "kept the old one": "kernels made anew",
    "agree with the learner's": "probe",
}
"""Words of each fault's message, and what says them."""

console = Console(highlight=False)


@dataclass(frozen=True)
class Fault:
    """One way in which an update goes wrong; at most one of the four plants it."""

    name: str
    """For the table."""
    caught_by: str
    """A value of _CATCHERS."""
    is_loaded: bool = False
    """Whether it can only be seen once the engine's weights are changed."""
    sent: Callable[[Tensors, dict[str, Tensor]], Tensors] | None = None
    """The learner packs other tensors than its own; gets also those of the version before."""
    announced: Callable[[list[TensorSlot]], list[TensorSlot]] | None = None
    """The learner announces another layout than it packs."""
    transit: Callable[[list[Tensor], list[Tensor]], None] | None = None
    """Bytes change on the way; gets also the buckets of the version before."""
    worker: Callable[[Any], None] | None = None
    """The engine's worker loads wrongly, once."""


@dataclass(frozen=True)
class Outcome:
    """What became of one faulty update and of the good one after it."""

    error: str
    """The generator's answer to the faulty one."""
    caught_by: str
    """See _CATCHERS."""
    is_loaded: bool
    """Whether the engine's weights had changed."""
    is_verified: bool
    """Whether the generator still let trajectories out; then under the version before."""
    states: list[str]
    """Of the generator, since the faulty update came."""
    seconds: float
    """From the order to the answer."""
    is_healed: bool
    """The good update after it was verified and the engine computes what its weights say."""


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


def _once(worker: Any, spoil: Callable[[Callable[[Any], Any], Tensors], Any]) -> None:
    """The worker's next loading is `spoil(load, tensors)`."""
    receiving = worker.weight_transfer_engine
    load = receiving._load

    def loading(tensors: Tensors) -> Any:
        receiving._load = load
        return spoil(load, tensors)

    receiving._load = loading


def _leave_out(worker: Any) -> None:
    _once(worker, lambda load, tensors: load(_without(tensors, _NORM)))


def _load_another(worker: Any) -> None:
    _once(worker, lambda load, tensors: load([(n, t + 1e-6 if n == _NORM else t) for n, t in tensors]))


def _break_off(worker: Any) -> None:
    def half(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        yield from tensors[: len(tensors) // 2]
        raise ValueError("planted")

    _once(worker, lambda load, tensors: load(half(tensors)))


def _keep_head_kernel(worker: Any) -> None:
    head = worker.weight_transfer_engine.model.lm_head
    kernel = head.cpu_linear

    def spoil(load: Callable[[Any], Any], tensors: Tensors) -> Any:
        loaded = load(tensors)
        head.cpu_linear = kernel
        return loaded

    _once(worker, spoil)


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
        "the tied head is sent as it was before",
        "ties: names of one tensor, same bytes",
        sent=lambda new, old: [(name, old[name] if name == _HEAD else tensor) for name, tensor in new],
    ),
    Fault("the head's kernel keeps the old weights", "kernels made anew", is_loaded=True, worker=_keep_head_kernel),
    Fault("the engine's loader leaves a norm out", "what the engine says it loaded", is_loaded=True, worker=_leave_out),
    Fault("the engine's loader writes a wrong value", "reading back", is_loaded=True, worker=_load_another),
    Fault("the engine's loader breaks off", "the engine's loader itself", is_loaded=True, worker=_break_off),
    Fault("one bit flips on the way", "checksum of the bucket", transit=_flip_bit),
    Fault("a bucket of the version before arrives", "checksum of the bucket", transit=_send_old_bucket),
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
    """A generator's adoption over a real engine, and a learner that makes mistakes."""

    def __init__(self, folder: Path, *, set_variable: SetVariable = os.environ.__setitem__) -> None:
        # Faults of the worker travel there as functions.
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
        )
        self._adopting = self.rig.run(self._begin())

    def close(self) -> None:
        """End the engine."""
        self._adopting.cancel()
        self.rig.close()

    def send(self, message: Any) -> None:
        """What the generator says to the learner."""
        self._answers.put_nowait(message)

    def run(self, fault: Fault) -> Outcome:
        """Good, faulty, good."""
        return self.rig.run(self._run(fault))

    async def _begin(self) -> asyncio.Task[None]:
        adopting = asyncio.create_task(self._updates.run())
        self._updates.submit(self.rig.opening())
        await asyncio.gather(self.rig.seat_learner(), self._answers.get())
        return adopting

    async def _run(self, fault: Fault) -> Outcome:
        await self._adopt(self._moved(_LEAP))
        before = self._version
        self.states.clear()
        started_at = time.perf_counter()
        answer = await self._adopt(self._moved(_STEP), fault)
        seconds = time.perf_counter() - started_at
        states, is_verified = list(self.states), self._updates.is_verified.is_set()
        is_loaded = self.rig.engine.version != before
        healing = await self._adopt(self._moved(_LEAP))
        is_healed = not healing.error and self._updates.is_verified.is_set() and await self._agrees()
        return Outcome(answer.error, _catcher(answer.error), is_loaded, is_verified, states, seconds, is_healed)

    async def _adopt(self, module: Qwen2ForCausalLM, fault: Fault | None = None) -> UpdateApplied:
        """Publish the module's weights as the next version, as the fault wants."""
        self._version += 1
        update, packed = self._ship(module, fault)
        if fault and fault.worker:
            await self.rig.engine._running.collective_rpc(fault.worker)
        self._updates.submit(update)
        _, answer = await asyncio.gather(self.rig.broadcast(packed), self._answers.get())
        if fault is None:
            self._packed = packed
        self._module = module
        return answer

    def _ship(self, module: Qwen2ForCausalLM, fault: Fault | None) -> tuple[Update, list[Tensor]]:
        tensors = tensors_of(module)
        if fault and fault.sent:
            tensors = fault.sent(tensors, dict(tensors_of(self._module)))
        update, packed = announce(
            tensors, module=module, epoch=self.rig.epoch, version=self._version, bucket_bytes=_BUCKET_BYTES
        )
        if fault and fault.announced:
            update = msgspec.structs.replace(update, slots=fault.announced(update.slots))
        if fault and fault.transit:
            fault.transit(packed, self._packed)
        return update, packed

    def _moved(self, distance: float) -> Qwen2ForCausalLM:
        module = make_module(is_tied=True)
        module.load_state_dict(self._module.state_dict())
        chance = torch.Generator().manual_seed(self._version + 1)
        for parameter in module.parameters():
            parameter.add_(distance * torch.randn(parameter.shape, generator=chance).sign())
        return module

    async def _agrees(self) -> bool:
        ours = await self.rig.engine.prompt_logprobs(_PROMPT)
        theirs = prompt_logprobs(self._module, _PROMPT)
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4

    async def _release(self, _: str) -> None:
        self.states.append("released")


def _catcher(error: str) -> str:
    return next((catcher for words, catcher in _CATCHERS.items() if words in error), error or "nothing")


def main(arguments: argparse.Namespace) -> None:
    """Plant, show, write."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        scene = PlantedFaults(Path(folder) / "model")
        try:
            outcomes = {fault.name: scene.run(fault) for fault in FAULTS}
        finally:
            scene.close()
    table = Table("fault", "caught by", "load", "afterwards", "healed", "s", title="Planted faults, real vLLM")
    for name, outcome in outcomes.items():
        when = "after" if outcome.is_loaded else "before"
        afterwards = "version before, verified" if outcome.is_verified else "work handed back, nothing verified"
        healed = "yes" if outcome.is_healed else "NO"
        table.add_row(name, outcome.caught_by, when, afterwards, healed, f"{outcome.seconds:.3f}")
    console.print(table)
    if arguments.out:
        machine = {"cores": os.cpu_count(), "load_average": psutil.getloadavg()}
        results = {name: msgspec.to_builtins(outcome) for name, outcome in outcomes.items()}
        arguments.out.write_text(json.dumps({"machine": machine, "faults": results}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file")
    main(parser.parse_args())
