"""`python -m tests.chaos.watched.generator [--light] [--misbehaves] [--lies] [overrides]`: a generator with a journal.

It runs `python -m slipstream.generators` with patches: a journal at both ends of the client and, with `--light`, an
engine without weights, a character tokenizer, and in-process rewards, so that a start takes milliseconds.
"""

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.broker.transport import client, outbox, session
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.weights import collective
from slipstream.buffer.codec import unpack
from slipstream.buffer.trajectory import Reward, TrajectoryHeader
from slipstream.generators import __main__ as role
from slipstream.generators import build, tokenization
from slipstream.generators.engines.engine import VOCABULARY, ScriptedEngine
from slipstream.generators.errors import PromptError
from slipstream.generators.generator import Generator
from slipstream.generators.rewards.reward import RewardInput
from tests.chaos.stage import ANSWER_TIMEOUT_S, JOURNALS
from tests.chaos.watched.channel import WatchedChannel
from tests.chaos.watched.credit import Credit
from tests.chaos.watched.journal import Journal, content_of
from tests.fakes import NoBytes

_FAILING, _SPOILED, _LONG = 0.01, 0.01, 0.006
"""Fractions of responses that fail, arrive damaged, or outlast every lease."""
_LONG_TOKENS = 36
_SILENCE_S = 3.0
"""Broker silence after which a light generator rejoins: longer than any stop."""
_UPDATE_S = 0.03


def main(arguments: Sequence[str]) -> None:
    flags = {argument for argument in arguments if argument in ("--light", "--misbehaves", "--lies")}
    rest = [argument for argument in arguments if argument not in flags]
    WatchedChannel.journal = Journal(Path(JOURNALS), role.split_id(rest)[0])
    WatchedChannel.misbehaves, WatchedChannel.lies = "--misbehaves" in flags, "--lies" in flags
    session.ZmqClientChannel = WatchedChannel
    watch_client(is_light="--light" in flags)
    watch_end()
    if "--light" in flags:
        lighten()
    role.main(rest)


def watch_client(*, is_light: bool) -> None:
    put = BrokerClient.put

    def watched(client: BrokerClient, header: TrajectoryHeader, payload: bytes) -> None:
        channel = client._channel
        trajectory = unpack(payload)
        is_spoiled = is_light and header.purpose == "train" and random.random() < _SPOILED
        names = {"id": header.id, "lease": header.lease_id, "purpose": header.purpose}
        facts = {"content": content_of(trajectory), "state": client._status().state, "spoiled": is_spoiled}
        channel.journal.write("put", **names, **facts, verified=WatchedChannel.is_verified())
        if is_spoiled:
            payload = payload[:-3]
        channel.credit.add(header.id, len(payload))
        put(client, header, payload)

    BrokerClient.put = watched


def watch_end() -> None:
    """Record the end of the serving loop: the broker takes back later prompts at the Bye.

    From its start, the journal also records whether the weights are verified.
    """
    run = Generator.run

    async def watched(generator: Generator) -> None:
        WatchedChannel.is_verified = generator._weight_updates.is_verified.is_set
        try:
            await run(generator)
        finally:
            WatchedChannel.journal.write("left")

    Generator.run = watched


class CharacterTokenizer:
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [2 + int(character) if character.isdigit() else 1 for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(str(token - 2) for token in token_ids if token >= 2)


class InlineRewards:
    """In-process rewards of 0 or 1 from the text, so that some groups have no signal and are rejected."""

    def __init__(self, config: Any) -> None:
        self._config = config

    async def start(self) -> None:
        """There is no worker."""

    async def score(self, sample: RewardInput) -> Reward:
        is_right = sum(map(ord, sample.response)) % 2 == 1
        return Reward(total=float(is_right), is_correct=is_right)

    def compares(self, data_source: str) -> bool:
        """Send answers one by one, so that more groups are split."""
        return False

    def close(self) -> None:
        """There is no worker."""


class LightEngine(ScriptedEngine):
    """A ScriptedEngine with some failing and some slow responses; an update takes a moment."""

    async def generate(self, prompt_token_ids: list[int], sampling: Any, *, request_id: str, stop: Any = ()) -> Any:
        chance = random.Random(f"{sampling.seed} fails")
        if sampling.temperature > 0 and chance.random() < _FAILING:
            raise PromptError(f"{request_id} fails on purpose")
        return await super().generate(prompt_token_ids, sampling, request_id=request_id, stop=stop)

    async def switch(self, update: Any) -> float:
        await asyncio.sleep(_UPDATE_S)
        return await super().switch(update)

    def _script(self, seed: int) -> list[int]:
        script = super()._script(seed)
        chance = random.Random(f"{seed} is long")
        if chance.random() >= _LONG:
            return script
        return [chance.choice(VOCABULARY) for _ in range(_LONG_TOKENS)] + script


def lighten() -> None:
    client.BROKER_SILENCE_S = _SILENCE_S
    outbox._ANSWER_TIMEOUT_S = Credit.answer_timeout_s = ANSWER_TIMEOUT_S
    collective.CollectiveReceiver = lambda device: NoBytes()
    tokenization.load_tokenizer = lambda model: CharacterTokenizer()
    build.RewardPool = InlineRewards
    build.ScriptedEngine = LightEngine


if __name__ == "__main__":
    main(sys.argv[1:])
