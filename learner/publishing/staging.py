"""Staging: copies a version's weights into flat buckets, to be sent during training."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
from transformers import AutoTokenizer

from slipstream.broker.dataset import read_train
from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.configs.base import ConfigError
from slipstream.configs.broker import PROBE_SEQUENCES, WeightsConfig
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Sample
from slipstream.learner.engines.engine import TrainEngine
from slipstream.learner.errors import SampledLogprobsError

_UNCALIBRATED_NATS = 0.3
_CALIBRATION_FACTOR = 3.0
_STANDARD_ERRORS = 6.0
SEQUENCE_TOKENS = 16

Canary = tuple[list[list[int]], list[list[float]]]
"""Canary sequences, and the log-probability of each token after the first with the learner's weights."""

log = structlog.get_logger(__name__)


def canary_token_ids(run: RunConfig, *, vocab_size: int, text: Sequence[int] = ()) -> np.ndarray:
    """Canary sequences from `text`, or random ones if it is too short.

    int64[PROBE_SEQUENCES, min(16, max_length)], the same for the whole run.
    """
    shape = PROBE_SEQUENCES, min(SEQUENCE_TOKENS, run.model.max_length)
    if len(text) >= math.prod(shape):
        return np.array(text[: math.prod(shape)], dtype=np.int64).reshape(shape)
    return np.random.default_rng([run.seed, vocab_size]).integers(0, vocab_size, size=shape)


def prompt_tokens(run: RunConfig, *, num_tokens: int = 8192) -> list[int]:
    """First tokens of the training prompts; empty without the file.

    In bfloat16, engine and learner agree more closely on text.
    """
    tokens: list[int] = []
    try:
        rows = read_train(run)
        tokenizer = AutoTokenizer.from_pretrained(run.model.path, trust_remote_code=run.model.trust_remote_code)
        for index in range(min(len(rows), num_tokens)):
            prompt = rows.row(index).prompt
            texts = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
            for text in texts:
                tokens += tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) >= num_tokens:
                break
    except (ConfigError, OSError, ValueError, KeyError) as error:
        log.info("probe_of_random_tokens", reason=str(error))
        return []
    return tokens[:num_tokens]


class ProbeLimit:
    """Largest mean difference allowed in a probe, nats: `max_probe_diff`, or 3x the first version's if larger.

    Calibration is for engines below float32, with kernels that round differently. Before it, the limit is at least 0.3
    nats, which still catches any misplaced tensor.
    """

    def __init__(self, max_probe_diff: float, *, is_calibrated: bool) -> None:
        self._is_calibrated = is_calibrated
        self._floor = max_probe_diff
        self.nats = max_probe_diff if is_calibrated else max(max_probe_diff, _UNCALIBRATED_NATS)

    def calibrate(self, diff: float) -> None:
        """Later calls are no-ops."""
        if not self._is_calibrated:
            self._is_calibrated, self.nats = True, max(self._floor, _CALIBRATION_FACTOR * diff)
            log.info("probe_calibrated", diff=diff, limit=self.nats)


def check_first_step(row: Mapping[str, Any], *, run: RunConfig, limit: float) -> None:
    """Raise SampledLogprobsError unless the learner reproduces the log-probabilities of step 1.

    The same weights sampled and scored it, so only rounding may differ. With r = p_learner / p_generator:

    mean |log r| <= limit        |mean r - 1| <= max_probe_diff + 6 standard errors

    Sampling with the reported probabilities gives E r = 1 despite rounding, so the second rule finds a constant bias
    within the first rule's bfloat16 tolerance.

    `row`: metrics of the step. `limit`: the probe limit calibrated on version 0.
    """
    sampling, algorithm, prefix = run.generators.sampling, run.algorithm, "learner/by_lag/0/"
    is_comparable = (
        run.mode != "replay"
        and not isinstance(run.generators.engine, ScriptedEngineConfig)
        # Otherwise only the engine's distribution is truncated.
        and not sampling.is_truncated
        # Otherwise some metrics are measured after the first of several updates.
        and (algorithm.updates_per_step == 1 or algorithm.needs_start_logprobs)
        # A guest must not stop the run. Its answers are audited.
        and not run.cluster.untrusted_generators.names
    )
    if not is_comparable or f"{prefix}tokens" not in row:
        return
    num_tokens, distance, ratio = (row[prefix + name] for name in ("tokens", "mismatch_mean", "mismatch_ratio_mean"))
    error = math.sqrt(max(0.0, row[f"{prefix}chi2"] + 1 - ratio**2) / num_tokens)
    allowed = run.weights.max_probe_diff + _STANDARD_ERRORS * error
    for what, found, most in (("mean |log r|", distance, limit), ("|mean r - 1|", abs(ratio - 1), allowed)):
        if found > most:
            raise SampledLogprobsError(
                "generators must report the log-probabilities with which they sample, and those of step 1 must be the "
                f"learner's: over {num_tokens:g} tokens {what} must be at most {most:.3g}, got {found:.3g}, with r = "
                "p_learner / p_generator. Every gradient would be biased. Look for plugins and patches of the engine, "
                "compare dtype, attention and quantization of generators.engine and model, or raise "
                "weights.max_probe_diff if the difference is intended."
            )


@torch.no_grad()
def canary_logprobs(engine: TrainEngine, token_ids: np.ndarray, *, layout: Layout) -> list[list[float]]:
    """Log-probabilities of tokens 1.. at temperature 1, in the training layout. Collective."""
    num_sequences, length = token_ids.shape
    trained = np.arange(1, length)
    samples = [Sample(ids, trained, index * len(trained), group_id=str(index)) for index, ids in enumerate(token_ids)]
    logprobs = torch.zeros(num_sequences * len(trained))
    # On every rank: a sharded model needs the same calls on each.
    for microbatch in collate(samples, layout=layout):
        logprobs[microbatch.indices] = engine.forward(microbatch.to(engine.device))["logprobs"].float().cpu()
    return logprobs.reshape(num_sequences, -1).tolist()


class Staged:
    """A copied version.

    Life: stage -> finish. Before `finish`, in the sending thread, the bytes may be only on the GPU and have no
    checksums. `update`, `buckets`, and `checksum` call it.
    """

    def __init__(self, update: Update, memory: SharedBuckets, *, pull: Callable[[], None] | None = None) -> None:
        """`pull` copies the weights into `memory`."""
        self.version = update.version
        self.memory = memory
        """Mapped by generators on this machine, and overwritten after all have answered."""
        self._update = update
        self._pull = pull
        # Separate: staging the next version needs these bytes, but no checksums.
        self._pulling, self._summing = Lock(), Lock()

    def pull(self) -> None:
        """Block until the bytes are in host memory. Idempotent, thread-safe."""
        with self._pulling:
            if self._pull:
                self._pull()
                self._pull = None

    def finish(self) -> "Staged":
        """Like `pull`, then compute the checksums."""
        self.pull()
        with self._summing:
            if not self._update.checksums:
                self._update = msgspec.structs.replace(self._update, checksums=buckets.checksums(self.memory.tensors))
        return self

    @property
    def update(self) -> Update:
        """The publisher fills in epoch, members, and timeout."""
        return self.finish()._update

    @property
    def buckets(self) -> list[torch.Tensor]:
        """uint8, one tensor per message of a broadcast."""
        return self.finish().memory.tensors

    @property
    def checksum(self) -> str:
        return buckets.combine(self.update.checksums)


class Stager:
    """Copies weights into buckets that are not in flight. Used by the learner's main thread.

    With room on the GPU, packs them into buckets there, one set for all versions, and the learner waits only for that.
    The sending thread copies to the host during training, on a separate stream.
    """

    def __init__(
        self,
        config: WeightsConfig,
        *,
        metadata: Iterable[buckets.TensorMeta],
        device: torch.device | None = None,
        cuda: Any = torch.cuda,
    ) -> None:
        """`metadata`: tensors of a version, in layout order. `cuda`: torch.cuda or a substitute."""
        self._config = config
        tensors = list(metadata)
        self._slots, self._sizes = buckets.plan(tensors, bucket_bytes=config.bucket_bytes)
        is_exact = all(dtype.itemsize >= torch.float32.itemsize for _, _, dtype in tensors)
        self.probe_limit = ProbeLimit(config.max_probe_diff, is_calibrated=is_exact)
        self._device = device
        self._cuda = cuda
        self._is_pinned = device is not None and device.type == "cuda"
        self._device_buckets: list[torch.Tensor] | None = None
        self._has_staged = False
        self._newest: Staged | None = None

    def stage(
        self, *, version: int, weights: Iterable[tuple[str, torch.Tensor]], canary: Canary, reuse: Staged | None = None
    ) -> Staged:
        """Copy all weights as `version`, into the buckets of `reuse` if given."""
        update = Update(
            epoch=0,
            members=[],
            version=version,
            slots=self._slots,
            bucket_bytes=self._sizes,
            checksums=[],
            canary_token_ids=canary[0],
            canary_logprobs=canary[1],
            max_probe_diff=self.probe_limit.nats,
            timeout_s=self._config.transfer_timeout_s,
        )
        is_reused = reuse is not None and reuse.memory.sizes == self._sizes
        memory = reuse.memory if reuse and is_reused else SharedBuckets(self._sizes, is_pinned=self._is_pinned)
        # The first step has not allocated its share of the GPU's memory yet.
        if self._device_buckets is None and (self._has_staged or self._config.staging == "device"):
            self._device_buckets = self._allocate_on_device()
        self._has_staged = True
        # One tensor at a time: all weights may not fit on this rank.
        if not self._device_buckets:
            buckets.pack(weights, self._slots, into=memory.tensors)
            return Staged(update, memory)
        if self._newest and self._newest is not reuse:
            # The previous version may exist only in the device buckets.
            self._newest.pull()
        packed = self._device_buckets
        buckets.pack(weights, self._slots, into=packed)
        is_packed = self._cuda.current_stream(self._device).record_event()
        self._newest = Staged(update, memory, pull=partial(self._copy_to_host, packed, memory.tensors, is_packed))
        return self._newest

    def _allocate_on_device(self) -> list[torch.Tensor]:
        """Empty if disabled or memory is short. Raises torch.OutOfMemoryError with staging=device."""
        staging, is_cpu = self._config.staging, self._device is None or self._device.type == "cpu"
        if staging == "host" or (is_cpu and self._cuda is torch.cuda):
            return []
        # At most half of the free memory: later steps may be longer.
        if staging == "auto" and 2 * sum(self._sizes) > self._cuda.mem_get_info(self._device)[0]:
            return []
        try:
            return [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in self._sizes]
        except torch.OutOfMemoryError as error:
            # Free memory may be fragmented.
            if staging == "device":
                raise
            log.warning("staged_on_host", error=str(error))
            return []

    def _copy_to_host(self, packed: list[torch.Tensor], host: list[torch.Tensor], is_packed: Any) -> None:
        stream = self._cuda.Stream(self._device)
        stream.wait_event(is_packed)
        with self._cuda.stream(stream):
            for into, bucket in zip(host, packed, strict=True):
                into.copy_(bucket, non_blocking=True)
        stream.synchronize()
