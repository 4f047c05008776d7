"""Episode: one answer in progress, as seen by an agent loop."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from slipstream.broker.messages import Prompt
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan
from slipstream.configs.base import Record
from slipstream.generators.engines.engine import Completion, Engine
from slipstream.generators.errors import EngineError, GeneratorError
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder
from slipstream.runtime.images import PromptImage


class Agent(Protocol):
    """Turns leased prompts into scored trajectories, on one asyncio loop."""

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        """Generate member `index` of the prompt's group. Raises GeneratorError. Canceling aborts it."""

    async def start(self) -> None:
        """Start servers and processes. Raises GeneratorError."""

    async def close(self) -> None:
        """Stop them within bounded time."""

    @property
    def waiting(self) -> str:
        """Reason that answers wait, or empty. Thread-safe."""


class AgentLoop(Protocol):
    """Alternates model turns and observations. One object serves all answers."""

    def tools(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        return None

    async def run(self, episode: Any) -> None:
        """Fill an Episode. Exceptions other than GeneratorError fail only this answer."""


class Scorer(Protocol):
    """Scores samples. RewardPool implements it."""

    async def score(self, sample: RewardInput) -> Reward:
        """Score one sample. Failures are a Reward with another status, never an exception."""

    def compares(self, data_source: str) -> bool:
        """Whether `score_group` compares answers of this source."""

    async def score_group(self, samples: list[RewardInput]) -> list[Reward]:
        """Score and compare answers to one prompt. Keeps their order."""


class Transcript:
    """A prompt and the turns after it.

    Example of two turns:   prompt 5 7 | model 3 9 | environment 4 | model 8 1
        token_ids  5 7 3 9 4 8 1      model_mask  0 0 1 1 0 1 1      version_spans  [(2, 6), (5, 7)]
    """

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids: list[int] = list(prompt_token_ids)
        self.version_spans: list[VersionSpan] = []
        """`first_token` counts from the start of the transcript."""
        self.num_turns = 0
        self._model_mask: list[bool] = [False] * len(prompt_token_ids)
        self._logprobs: list[float] = [0.0] * len(prompt_token_ids)
        self._experts: list[np.ndarray] = []
        self._num_routed = 0

    def add_completion(self, completion: Completion) -> None:
        if completion.experts is not None:
            # Earlier turns keep the routing with which they were sampled.
            self._experts.append(completion.experts[self._num_routed :])
            self._num_routed = len(completion.experts)
        self._add_spans(completion.version_spans)
        # A completion without an observation before it extends the previous turn.
        self.num_turns += self._model_mask[-1:] != [True]
        self._extend(completion.token_ids, completion.logprobs, is_model=True)

    def add_observation(self, token_ids: list[int]) -> None:
        self._extend(token_ids, [0.0] * len(token_ids), is_model=False)

    def trim(self) -> None:
        """Drop observations after the last model turn."""
        length = len(self._model_mask) - self._model_mask[::-1].index(True)
        for column in (self.token_ids, self._model_mask, self._logprobs):
            del column[length:]

    def append(self, other: "Transcript") -> None:
        self._add_spans(other.version_spans)
        self.num_turns += other.num_turns
        if other.experts is not None:
            self._experts.append(other.experts)
            self._num_routed += len(other.experts)
        self.token_ids += other.token_ids
        self._logprobs += other._logprobs
        self._model_mask += other._model_mask

    @property
    def model_mask(self) -> np.ndarray:
        """bool[T], true for the model's tokens."""
        return np.array(self._model_mask, dtype=np.bool_)

    @property
    def generator_logprobs(self) -> np.ndarray:
        """float32[T], 0 for tokens that the model did not write."""
        return np.array(self._logprobs, dtype=np.float32)

    @property
    def experts(self) -> np.ndarray | None:
        """uint8 or int16[T, M, K], see EXPERTS; None if the engine does not record routing."""
        if not self._experts:
            return None
        experts = np.concatenate(self._experts)
        return np.pad(experts, ((0, len(self.token_ids) - len(experts)), (0, 0), (0, 0)))

    def _add_spans(self, spans: list[VersionSpan]) -> None:
        for span in spans:
            # A turn with the previous version extends its span.
            if not self.version_spans or self.version_spans[-1].version != span.version:
                self.version_spans.append(VersionSpan(len(self.token_ids) + span.first_token, span.version))

    def _extend(self, token_ids: list[int], logprobs: list[float], *, is_model: bool) -> None:
        if len(token_ids) != len(logprobs):
            raise ValueError(f"every token must have a log-probability: {len(token_ids)} tokens, {len(logprobs)} given")
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._model_mask += [is_model] * len(token_ids)


class Turn(Record):
    """Text and tokens of a turn."""

    text: str
    """Without special tokens, but with the stop string."""
    token_ids: list[int]
    """Includes the end token."""
    stop_reason: str
    """`stop` (end token) | `stop_string` (also a stop token) | `length` | `context_overflow`."""


class Access(Protocol):
    """An agent's access to the model, valid until its answer ends."""

    base_url: str
    model: str

    @property
    def api_key(self) -> str: ...

    def idle_s(self) -> float:
        """Time since the agent's last request; 0 while a request is open."""

    def renew(self) -> None:
        """Replace the key, and forget responses under the old one."""


@dataclass(kw_only=True, eq=False)
class Episode:
    """One answer in progress, which becomes a trajectory.

    Life cycle: generate -> (observe -> generate)*.
    """

    id: str
    """Unique within the run."""
    prompt: Prompt
    """Dataset row: `prompt`, `ground_truth`, `data_source`, `extra_info`."""
    contexts: list[Transcript]
    """The context of `generate`, then those of requests to the model server. Those without model tokens are dropped at
    the end."""
    images: Sequence[PromptImage]
    """Images of the first context; empty if that is dropped."""
    stop: Sequence[str | int]
    """Texts and token ids that end every turn."""
    sampling: Sampling
    """Sampling of the first turn. Later turns get the remaining `max_tokens` and another seed."""
    max_length: int
    """Limit on prompt plus answer, tokens."""
    engine: Engine
    encoder: PromptEncoder
    seed_of: Callable[[int], int]
    """Request number, from 0 -> seed."""
    num_requests: int = 0
    door: Access | None = None
    """Access for HTTP requests to the model."""
    fault: GeneratorError | None = None
    """Engine failure in any request."""
    turns: list[Turn] = field(default_factory=list)
    """Model turns in all contexts, in order of completion."""
    reward: Reward | None = None
    """From the loop; replaces the reward function."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Chat messages after the prompt, for the reward function."""
    turn_rewards: list[float] = field(default_factory=list)
    """From the loop, one per turn or none."""
    metrics: Counter[str] = field(default_factory=Counter)
    """Reported numbers, such as `tool_calls`."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Plain values stored with the trajectory."""
    stop_reason: str = "stop"
    """Stop reason of the last turn, unless the loop sets another."""

    @property
    def transcript(self) -> Transcript:
        return self.contexts[0]

    @property
    def room(self) -> int:
        return self.room_after(self.transcript.token_ids)

    def room_after(self, token_ids: list[int]) -> int:
        """Tokens that the model may write after these."""
        written = sum(len(turn.token_ids) for turn in self.turns)
        return min(self.sampling.max_tokens - written, self.max_length - len(token_ids))

    def reason_of_no_room(self, token_ids: list[int]) -> str:
        """`length` if `max_tokens` is used up, else `context_overflow`."""
        return "length" if len(token_ids) < self.max_length else "context_overflow"

    async def generate(self, *, max_tokens: int | None = None, stop: str | Sequence[str] = ()) -> Turn:
        """Let the model write a turn, up to its end token, a string in `stop`, or a limit. Raises EngineError.

        Without room, sets the stop reason and returns an empty turn, which is not recorded.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens of a turn must be >= 1, got {max_tokens}")
        transcript = self.transcript
        if self.room <= 0:
            self.stop_reason = self.reason_of_no_room(transcript.token_ids)
            return Turn("", [], self.stop_reason)
        limit = self.room if max_tokens is None else min(max_tokens, self.room)
        stops = [stop] if isinstance(stop, str) else stop
        completion = await self.sample([*transcript.token_ids], max_tokens=limit, stop=stops, images=self.images)
        turn = self.record(transcript, completion)
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    async def sample(
        self, token_ids: list[int], *, max_tokens: int, stop: Sequence[str], images: Sequence[PromptImage] = ()
    ) -> Completion:
        """Request a completion without recording it. Raises EngineError."""
        number, self.num_requests = self.num_requests, self.num_requests + 1
        sampling = msgspec.structs.replace(self.sampling, max_tokens=max_tokens, seed=self.seed_of(number))
        request_id = f"{self.id}-turn-{number}" if number else self.id
        shown: dict[str, Any] = {"images": images} if images else {}
        # vLLM rejects empty stop strings.
        ends = (*self.stop, *(text for text in stop if text))
        try:
            return await self.engine.generate(token_ids, sampling, request_id=request_id, stop=ends, **shown)
        except GeneratorError as error:
            self.fault = error
            raise
        except Exception as error:
            # Every prompt would fail.
            self.fault = EngineError(f"request {request_id} failed: {type(error).__name__}: {error}")
            raise self.fault from error

    def record(self, transcript: Transcript, completion: Completion) -> Turn:
        transcript.add_completion(completion)
        turn = Turn(self.encoder.decode(completion.token_ids), completion.token_ids, completion.stop_reason)
        self.turns.append(turn)
        self.stop_reason = turn.stop_reason
        return turn

    def observe(self, text: str, *, special_tokens: bool = False) -> None:
        """Append text that the model did not write, without a chat template.

        `special_tokens`: encode names such as `<|im_end|>` as those tokens. Not for untrusted text.
        """
        self._append(self.encoder.encode_text(text, special_tokens=special_tokens))
        self.messages.append({"role": "user", "content": text})

    def observe_messages(self, messages: list[dict[str, Any]]) -> None:
        """Append chat messages, formatted by the chat template. Raises PromptError."""
        last = self.transcript.token_ids[-1] if self.turns else None
        variables = self.encoder.row_variables(self.prompt)
        self._append(self.encoder.encode_between_turns(messages, last_token_id=last, variables=variables))
        self.messages += messages

    def _append(self, token_ids: list[int]) -> None:
        self.transcript.add_observation(token_ids)
        self.metrics["observation_tokens"] += len(token_ids)
