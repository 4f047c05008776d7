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
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.generators.errors import EngineDiedError, GeneratorError
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.model_files import check_model_path, check_same_model
from slipstream.runtime.process import die_with_launcher, on_stop_signal

_FLUSH_S = 3.0

log = structlog.get_logger(__name__)


@fail_cleanly(BrokerError, GeneratorError, restartable=(EngineDiedError, ClientDiedError))
def main(arguments: list[str]) -> None:
    """Join a run and generate until drained."""
    exit_after_help(arguments, __doc__)
    peer_id, overrides = _split(arguments)
    configure_logs(peer_id)
    die_with_launcher()
    broker = load(overrides).broker
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


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    if arguments[:1] == ["--id"] and len(arguments) > 1:
        return arguments[1], arguments[2:]
    return f"generator-{socket.gethostname()}-{os.getpid()}", arguments


if __name__ == "__main__":
    main(sys.argv[1:])
