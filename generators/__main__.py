"""python -m generators [--id NAME] [broker.address=...]: start a generator; the broker tells it the rest.

python -m generators drain NAME [name=RUN]: tell a generator of a run to hand back its work and leave.
"""

import asyncio
import os
import socket
import sys
from functools import partial
from typing import Any

import msgspec
import structlog

from broker.draining import drain
from broker.errors import BrokerFault, LinkDied
from broker.inbox import call_in
from broker.joining import Joined, StatusBoard, join
from broker.logs import configure_logs
from broker.process import die_with_launcher, on_stop_signal
from broker.token import read_token
from configs.exits import fail_cleanly
from configs.load import load
from configs.model_fingerprint import check_same_model
from configs.model_path import check_model_path
from configs.run import RunConfig
from generators.engines.vllm_environment import vllm_environment
from generators.errors import EngineDied, GeneratorFault

_FLUSH_S = 3.0

log = structlog.get_logger(__name__)


@fail_cleanly(BrokerFault, GeneratorFault, passing=(EngineDied, LinkDied))
def main(arguments: list[str]) -> None:
    """Join, then generate until drained; or drain another one."""
    if arguments[:1] == ["drain"]:
        drain(arguments[1:])
        return
    peer_id, overrides = _split(arguments)
    configure_logs(peer_id)
    die_with_launcher()
    broker = load(overrides).broker
    board = StatusBoard()
    joined = join(
        "generator",
        address=broker.address,
        max_message_bytes=broker.max_message_bytes,
        peer_id=peer_id,
        status=board,
        timeout_s=broker.join_timeout_s,
        token=read_token(broker),
        weight_transport=_chosen_transport(overrides),
    )
    with joined.until_left(flush_s=_FLUSH_S):
        asyncio.run(_generate(joined, board))
    log.info("stopped")


async def _generate(joined: Joined, board: StatusBoard) -> None:
    run = msgspec.json.decode(joined.welcome.config_json, type=RunConfig)
    log.info("joined", run=run.name)
    os.environ.update(vllm_environment(run))
    check_model_path(run.model.path)
    check_same_model(run.model.path, joined.welcome.model)
    # Imported only now: torch and vLLM read the environment that came with the config.
    from broker.weights.collective import CollectiveReceiver
    from generators.assembly import assemble
    from generators.prompting import load_tokenizer

    generator = assemble(
        run,
        member=joined.member,
        link=joined.link,
        tokenizer=load_tokenizer(run.model),
        receiver=CollectiveReceiver(device="cpu"),
    )
    board.show(generator.status)
    loop = asyncio.get_running_loop()
    joined.inbox.forward_to(partial(call_in, loop, generator.receive))
    on_stop_signal(partial(call_in, loop, generator.drain, "stop signal"))
    await generator.run()


def _chosen_transport(overrides: list[str]) -> Any:
    """What this generator was told, and not what the run says; empty: nothing."""
    is_chosen = any(override.startswith("weights.transport=") for override in overrides)
    return load(overrides).weights.transport if is_chosen else ""


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    if arguments[:1] == ["--id"] and len(arguments) > 1:
        return arguments[1], arguments[2:]
    return f"generator-{socket.gethostname()}-{os.getpid()}", arguments


if __name__ == "__main__":
    main(sys.argv[1:])
