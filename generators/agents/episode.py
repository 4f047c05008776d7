"""Episode: what an agent loop works with while it answers one prompt."""

from collections import Counter
from collections.abc import Callable, Sequence
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
    """Turns a leased prompt into a scored trajectory. Calls run concurrently on one asyncio loop."""

    async def answer(self, prompt: Prompt, index: int) -> Trajectory:
        """Generate member `index` of the prompt's group. Raises PromptError, EngineError. Cancelling aborts it."""
        ...

    async def start(self) -> None:
        """Start what its loops need beside the engine. Raises GeneratorError."""
        ...

    async def close(self) -> None:
        """End it, within bounded time."""
        ...

    @property
    def waiting(self) -> str:
        """Reason for which answers wait for somebody outside; empty if they do not. May be read from any thread."""
        ...


class AgentLoop(Protocol):
    """Has the model write turns, and observes what others answer. One object serves all answers of a generator."""

    def tools(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        """Return the JSON schemas that the chat template shows with this prompt; None without any."""
        return None

    async def run(self, episode: Any) -> None:
        """Fill an Episode. An exception costs this answer alone. Raises EngineError."""
        ...


class Scorer(Protocol):
    """Scores samples; RewardPool in production."""

    async def score(self, sample: RewardInput) -> Reward:
        """Return the reward; failures are a Reward with another status, never an exception."""
        ...

    def compares(self, data_source: str) -> bool:
        """Return whether answers of this source are compared with each other: then `score_group` must be called."""
        ...

    async def score_group(self, samples: list[RewardInput]) -> list[Reward]:
        """Return the rewards of answers to one prompt, in their order."""
        ...


class Transcript:
    """Token ids, mask, log-probabilities and versions accumulated over the turns of one trajectory.

    It starts with the prompt; model and environment append in turn. Token ids only: text is never re-tokenised.

    Example of two turns:   prompt 5 7 | model 3 9 | environment 4 | model 8 1
        token_ids  5 7 3 9 4 8 1      model_mask  0 0 1 1 0 1 1      version_spans  [(2, 6), (5, 7)]
    """

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids: list[int] = list(prompt_token_ids)
        """All tokens so far: the prompt of the next turn's request."""
        self.version_spans: list[VersionSpan] = []
        """`first_token` counts from the start of the transcript."""
        self.num_turns = 0
        """Model turns; environment turns are not counted."""
        self._model_mask: list[bool] = [False] * len(prompt_token_ids)
        self._logprobs: list[float] = [0.0] * len(prompt_token_ids)
        self._experts: list[np.ndarray] = []
        self._num_routed = 0

    def add_completion(self, completion: Completion) -> None:
        """Append the model's turn, exactly as sampled."""
        if completion.experts is not None:
            # Those of earlier turns stay: they are of the passes that sampled them.
            self._experts.append(completion.experts[self._num_routed :])
            self._num_routed = len(completion.experts)
        self._add_spans(completion.version_spans)
        # A turn is a run of the model's tokens: one that goes on without an observation between is the same.
        self.num_turns += self._model_mask[-1:] != [True]
        self._extend(completion.token_ids, completion.logprobs, is_model=True)

    def add_observation(self, token_ids: list[int]) -> None:
        """Append the environment's turn: context for the model, masked in training."""
        self._extend(token_ids, [0.0] * len(token_ids), is_model=False)

    def trim(self) -> None:
        """Drop what was observed after the model's last turn: nobody read it."""
        length = len(self._model_mask) - self._model_mask[::-1].index(True)
        for column in (self.token_ids, self._model_mask, self._logprobs):
            del column[length:]

    def append(self, other: "Transcript") -> None:
        """Append the tokens, log-probabilities and spans of another context."""
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
        """bool[T], true where the model wrote the token."""
        return np.array(self._model_mask, dtype=np.bool_)

    @property
    def generator_logprobs(self) -> np.ndarray:
        """float32[T], 0 where the model did not write the token."""
        return np.array(self._logprobs, dtype=np.float32)

    @property
    def experts(self) -> np.ndarray | None:
        """uint8 or int16[T, M, K]: see EXPERTS; None where the engine records none."""
        if not self._experts:
            return None
        experts = np.concatenate(self._experts)
        missing = len(self.token_ids) - len(experts)
        return np.pad(experts, ((0, missing), (0, 0), (0, 0)))

    def _add_spans(self, spans: list[VersionSpan]) -> None:
        for span in spans:
            # A turn that starts under the version of the previous one extends its span: spans mark changes only.
            if not self.version_spans or self.version_spans[-1].version != span.version:
                self.version_spans.append(VersionSpan(len(self.token_ids) + span.first_token, span.version))

    def _extend(self, token_ids: list[int], logprobs: list[float], *, is_model: bool) -> None:
        if len(token_ids) != len(logprobs):
            raise ValueError(f"every token must have a log-probability: {len(token_ids)} tokens, {len(logprobs)} given")
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._model_mask += [is_model] * len(token_ids)


class Turn(Record):
    """A turn of the model.

    Example: Turn(text="The sum is <tool_call>", token_ids=[5, 3, 9], stop_reason="stop_string")
    """

    text: str
    """Its text without special tokens; a text that ended the turn is in it."""
    token_ids: list[int]
    """As sampled, end token included."""
    stop_reason: str
    """`stop` (end token) | `stop_string` | `length` | `context_overflow`."""


class Access(Protocol):
    """Access of one answer's agent to the model, valid until the answer is over."""

    base_url: str
    """Address of an OpenAI-compatible API."""
    model: str

    @property
    def api_key(self) -> str: ...

    def idle_s(self) -> float:
        """Seconds since the agent's last request; 0 while one is open."""
        ...

    def renew(self) -> None:
        """Replace the key: whoever has the old one is let in no more."""
        ...


class Episode:
    """One answer in the making: turns of the model, and observations between them.

    Life: generate -> (observe -> generate)*. The model's tokens are kept as sampled; observations are encoded once and
    appended. Its transcript, rewards, metrics and extras become the trajectory.
    """

    def __init__(
        self,
        *,
        prompt: Prompt,
        prompt_token_ids: list[int],
        sampling: Sampling,
        max_length: int,
        engine: Engine,
        encoder: PromptEncoder,
        request_id: str,
        seed_of: Callable[[int], int],
        images: Sequence[PromptImage] = (),
    ) -> None:
        """`max_length`: most tokens of prompt and answer. `seed_of`: turn, from 0 -> seed of its request. `images`:
        those of the prompt, which its own context shows."""
        self.id = request_id
        """Unlike that of any other answer of the run."""
        self.prompt = prompt
        """Row that is answered: `prompt`, `ground_truth`, `data_source`, `extra_info`."""
        self.images = images
        self.sampling = sampling
        """Sampling of the first turn; later ones have what is left of `max_tokens`, and another seed."""
        self.contexts = [Transcript(prompt_token_ids)]
        """Sequences of the answer: that of `generate`, then those of requests at the door. Those in which the model
        wrote nothing are left out."""
        self.door: Access | None = None
        """Address and key at which the agent can talk to the model by HTTP, for loops with `door: true`."""
        self.fault: GeneratorError | None = None
        """Failure of the engine, whoever made the request."""
        self.turns: list[Turn] = []
        """Turns of the model in all contexts, in the order of their ends."""
        self.reward: Reward | None = None
        """Set by a loop that scores the answer itself; the reward function is not called then."""
        self.messages: list[dict[str, Any]] = []
        """Chat messages after the prompt, for the reward function."""
        self.turn_rewards: list[float] = []
        """Rewards that the loop gives to turns, in order; empty, or one for each turn."""
        self.metrics: Counter[str] = Counter()
        """Numbers for reports, such as `tool_calls`."""
        self.extras: dict[str, Any] = {}
        """Data that is stored with the trajectory; plain values only."""
        self.stop_reason = "stop"
        """Reason of the end: the last turn's, unless the loop sets another one."""
        self._max_length = max_length
        self._engine = engine
        self._encoder = encoder
        self._seed_of = seed_of
        self._num_requests = 0

    @property
    def transcript(self) -> Transcript:
        """The context that `generate` continues."""
        return self.contexts[0]

    @property
    def room(self) -> int:
        """Tokens that the model may still write."""
        return self.room_after(self.transcript.token_ids)

    def room_after(self, token_ids: list[int]) -> int:
        """Tokens that the model may still write after these."""
        written = sum(len(turn.token_ids) for turn in self.turns)
        return min(self.sampling.max_tokens - written, self._max_length - len(token_ids))

    def reason_of_no_room(self, token_ids: list[int]) -> str:
        """`length` where `max_tokens` are written, `context_overflow` where the model's context is full."""
        return "length" if len(token_ids) < self._max_length else "context_overflow"

    async def generate(self, *, max_tokens: int | None = None, stop: str | Sequence[str] = ()) -> Turn:
        """Let the model write a turn, up to its end token, to one of the texts in `stop`, or to a limit.

        Without room it returns an empty turn, which is not recorded; the answer then ends with `length` where
        `max_tokens` are written, with `context_overflow` where the model's context is full. Raises EngineError.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens of a turn must be >= 1, got {max_tokens}")
        transcript = self.transcript
        if self.room <= 0:
            self.stop_reason = self.reason_of_no_room(transcript.token_ids)
            return Turn("", [], self.stop_reason)
        limit = self.room if max_tokens is None else min(max_tokens, self.room)
        token_ids = list(transcript.token_ids)
        stops = [stop] if isinstance(stop, str) else stop
        completion = await self.sample(token_ids, max_tokens=limit, stop=stops, images=self.images)
        turn = self.record(transcript, completion)
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    async def sample(
        self, token_ids: list[int], *, max_tokens: int, stop: Sequence[str], images: Sequence[PromptImage] = ()
    ) -> Completion:
        """Request a turn of the engine, without recording it. Raises EngineError."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        sampling = msgspec.structs.replace(self.sampling, max_tokens=max_tokens, seed=self._seed_of(number))
        request_id = f"{self.id}-turn-{number}" if number else self.id
        shown: dict[str, Any] = {"images": images} if images else {}
        # An empty text, which ends nothing, is a fault to vLLM.
        stop = tuple(text for text in stop if text)
        try:
            return await self._engine.generate(token_ids, sampling, request_id=request_id, stop=stop, **shown)
        except GeneratorError as error:
            self.fault = error
            raise
        except Exception as error:
            # A fault of the engine, not of the loop that asked for a turn: it would hit every prompt.
            self.fault = EngineError(f"request {request_id} failed: {type(error).__name__}: {error}")
            raise self.fault from error

    def record(self, transcript: Transcript, completion: Completion) -> Turn:
        """Append a turn to a context."""
        transcript.add_completion(completion)
        turn = Turn(self._encoder.decode(completion.token_ids), completion.token_ids, completion.stop_reason)
        self.turns.append(turn)
        self.stop_reason = turn.stop_reason
        return turn

    def observe(self, text: str, *, special_tokens: bool = False) -> None:
        """Append a text that the model did not write, without any template.

        `special_tokens`: whether names of special tokens in it, such as `<|im_end|>`, are those tokens; else they are
        text, whoever wrote it.
        """
        self._append(self._encoder.encode_text(text, special_tokens=special_tokens))
        self.messages.append({"role": "user", "content": text})

    def observe_messages(self, messages: list[dict[str, Any]]) -> None:
        """Append chat messages through the tokenizer's template: the end of the model's turn, the messages, the
        beginning of its next turn. Raises PromptError."""
        last = self.transcript.token_ids[-1] if self.turns else None
        self._append(self._encoder.encode_between_turns(messages, last_token_id=last))
        self.messages += messages

    def _append(self, token_ids: list[int]) -> None:
        self.transcript.add_observation(token_ids)
        self.metrics["observation_tokens"] += len(token_ids)
