"""python -m generators [--id NAME] [KEY=VALUE]...: start a generator; the broker sends it the run's settings.

python -m generators                                                     on the machine of the broker
python -m generators broker.address=tcp://HOST:5757 broker.token_file=token    on another machine

Most used settings:
  --id NAME                     name in the status, the logs and the trajectories; by default host and process id
  broker.address=ADDRESS        where the broker listens
  broker.token_file=FILE        secret of the run, when the broker asks for one
  broker.join_timeout_s=SECONDS how long to wait for a broker
  weights.transport=TRANSPORT   how this generator gets weights, in place of the run's choice

All settings: docs/settings.md; `slipstream config` prints them with their values.
Outside a checkout the module is called slipstream.generators.
"""

import asyncio
import os
import socket
import sys
from functools import partial
from typing import Any

import msgspec
import structlog

from slipstream.broker.errors import BrokerError, ClientDiedError
from slipstream.broker.handshake import read_token
from slipstream.broker.transport.inbox import call_threadsafe
from slipstream.broker.transport.session import Session, StatusBoard, join
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.generators.errors import EngineDiedError, EngineStartError, GeneratorError
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.model_files import check_model_path, check_same_model
from slipstream.runtime.process import die_with_launcher, on_stop_signal

_FLUSH_S = 3.0

log = structlog.get_logger(__name__)


@fail_cleanly(
    BrokerError,
    GeneratorError,
    restartable=(EngineDiedError, ClientDiedError),
    restartable_once=(EngineStartError,),
)
def main(arguments: list[str]) -> None:
    """Join a run and generate until drained."""
    exit_after_help(arguments, __doc__)
    peer_id, overrides = split_id(arguments)
    configure_logs(peer_id)
    die_with_launcher()
    broker = load(overrides).broker
    if ignored := ignored_settings(overrides):
        log.warning("settings_ignored", settings=ignored, reason="the broker sends those of the run")
    board = StatusBoard()
    session = join(
        "generator",
        address=broker.address,
        max_message_bytes=broker.max_message_bytes,
        peer_id=peer_id,
        status=board,
        timeout_s=broker.join_timeout_s,
        token=read_token(broker),
        weight_transport=_transport_override(overrides),
    )
    with session.leave_at_exit(flush_s=_FLUSH_S):
        asyncio.run(_generate(session, board))
    log.info("stopped")


async def _generate(session: Session, board: StatusBoard) -> None:
    run = msgspec.json.decode(session.welcome.config_json, type=RunConfig)
    log.info("joined", run=run.name)
    os.environ.update(vllm_environment(run))
    check_model_path(run.model.path)
    check_same_model(run.model.path, session.welcome.model)
    # Imported after the config has arrived: torch and vLLM read the environment at import.
    from slipstream.broker.weights.collective import CollectiveReceiver
    from slipstream.generators.build import assemble
    from slipstream.generators.tokenization import load_tokenizer

    generator = assemble(
        run,
        member=session.member,
        client=session.client,
        tokenizer=load_tokenizer(run.model),
        receiver=CollectiveReceiver(device="cpu"),
    )
    board.set_source(generator.status)
    loop = asyncio.get_running_loop()
    session.inbox.forward_to(partial(call_threadsafe, loop, generator.receive))
    on_stop_signal(partial(call_threadsafe, loop, generator.drain, "stop signal"))
    await generator.run()


def _transport_override(overrides: list[str]) -> Any:
    """Weight transport set for this generator alone; empty = the run's."""
    is_set = any(override.startswith("weights.transport=") for override in overrides)
    return load(overrides).weights.transport if is_set else ""


def ignored_settings(overrides: list[str]) -> list[str]:
    """Overrides without an effect here, where the broker sends the settings of the run."""
    return [text for text in overrides if not text.lstrip("+").startswith(("broker.", "weights.transport="))]


def split_id(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the generator's id and the overrides. Raises ConfigError for `--id` without a name."""
    words = [
        word for argument in arguments for word in (("--id", argument[5:]) if argument[:5] == "--id=" else (argument,))
    ]
    if "--id" not in words:
        return f"generator-{socket.gethostname()}-{os.getpid()}", words
    at = words.index("--id")
    if at + 1 == len(words) or not words[at + 1] or "=" in words[at + 1]:
        raise ConfigError("--id must be followed by a name, got none: write --id NAME.")
    return words[at + 1], words[:at] + words[at + 2 :]


if __name__ == "__main__":
    main(sys.argv[1:])
