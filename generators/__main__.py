"""python -m slipstream.generators [--id NAME] [KEY=VALUE]...: start a generator; the broker sends the run's settings.

python -m slipstream.generators name=mine                                       on the machine of the run, in its folder
python -m slipstream.generators broker.address=tcp://127.0.0.1:5757 broker.token_file=token  elsewhere, through a tunnel

Most used settings:
  --id NAME                     name in status, logs, and trajectories; default: host and process id, or the name of a
                                guest's token
  name=NAME                     run in runs_dir, whose folder holds address, token, and code; default: the run at
                                broker.address, or else the newest run whose broker listens
  broker.address=ADDRESS        where the broker listens, if the run folder is not on this machine
  broker.token_file=FILE        file with the run's secret, or set SLIPSTREAM_TOKEN in the environment
  model.path=FOLDER             the model's folder on this machine, if it differs from the broker's
  generators.reward.function=F, model.trust_remote_code=true    allow user code, which a broker alone may not choose
  broker.join_timeout_s=SECONDS how long to wait for a broker
  weights.transport=TRANSPORT   how this generator receives weights, overriding the run's setting

All settings: docs/settings.md; `slipstream config` prints them with their values.
Outside a checkout the module is called slipstream.generators.
"""

import asyncio
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from slipstream.broker.errors import BrokerError, ClientDiedError
from slipstream.broker.messages import PEER_ID_PATTERN
from slipstream.broker.transport.endpoints import collective_environment, is_listening
from slipstream.broker.transport.session import Session, StatusBoard, call_threadsafe, join
from slipstream.configs.base import ConfigError
from slipstream.configs.broker import FIRST_BROKER
from slipstream.configs.buffer import STORE_PASSWORD_VARIABLE
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.load import _OWN_SETTINGS, load
from slipstream.configs.run import RunConfig, read_config
from slipstream.generators.engines.vllm.environment import vllm_environment
from slipstream.generators.errors import EngineDiedError, EngineStartError, GeneratorError
from slipstream.generators.rewards.composition import BUILT_IN, REACHING_OUT
from slipstream.runtime.clock import Deadline
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.credentials import TOKEN_REMEDY, TOKEN_VARIABLE, derive_keys, find_token, given_token
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.model_files import check_model_path, check_same_model
from slipstream.runtime.process import collection_paused, ended_beside, exempt_from_collection, on_stop_signal
from slipstream.runtime.run_folder import RunFolder, describe_others, list_runs

_FLUSH_S = 3.0
_LOOK_EVERY_S = 1.0


_HARMLESS_TOOL = "calculator"
"""The only built-in tool that neither runs model-written code nor contacts an address."""

log = structlog.get_logger(__name__)


@fail_cleanly(
    BrokerError, GeneratorError, restartable=(EngineDiedError, ClientDiedError), restartable_once=(EngineStartError,)
)
def main(arguments: list[str]) -> None:
    """Join a run and generate until drained."""
    exit_after_help(arguments, __doc__)
    peer_id, overrides = split_id(arguments)
    configure_logs(peer_id)
    given = load(overrides)
    if ignored := ignored_settings(overrides):
        log.warning("settings_ignored", settings=ignored, reason="the broker sends the run's settings")
    board = StatusBoard()
    deadline = Deadline(given.broker.join_timeout_s, what="a run to join")
    own, token = wait_for_token(given, overrides, deadline=deadline)
    local = next((run for run in own if run is not given), None)
    load_engine(local, peer_id)
    keys, brokers = derive_keys(token), RunFolder(own[0]).broker_addresses
    address = brokers[FIRST_BROKER]
    is_set = any(override.startswith("weights.transport=") for override in overrides)
    transport: Any = given.weights.transport if is_set else ""
    session = join(
        "generator",
        address=address,
        brokers=brokers,
        keys=keys,
        max_message_bytes=own[0].broker.max_message_bytes,
        peer_id=keys.guest or peer_id,
        status=board,
        timeout_s=deadline.left_s,
        weight_transport=transport,
    )
    with session.leave_at_exit(flush_s=_FLUSH_S):
        run = accept_settings(session.welcome.config_json, own, overrides)
        log.info("joined", run=run.name)
        if (transport or run.weights.transport) == "collective":
            os.environ.update(collective_environment(run.cluster))
        asyncio.run(_generate(session, board, run=run, token=token, broker_address=address))
    log.info("stopped")
    if local:
        RunFolder(local).record_stage(peer_id, "stopped")


async def _generate(session: Session, board: StatusBoard, *, run: RunConfig, token: str, broker_address: str) -> None:
    os.environ.update(vllm_environment(run))
    check_model_path(run.model.path)
    check_same_model(run.model.path, session.welcome.model)
    # Local imports, because torch and vLLM read the environment at import.
    import torch

    from slipstream.broker.weights.collective import CollectiveReceiver
    from slipstream.generators.build import assemble, make_fetcher
    from slipstream.generators.tokenization import load_tokenizer

    keys = derive_keys(token, guests=run.cluster.untrusted_generators.names)
    # Only generators on other machines join broadcasts.
    is_far = run.cluster.trusted_network and not broker_address.startswith("ipc://")
    has_gpu = isinstance(run.generators.engine, VllmEngineConfig) and torch.cuda.is_available()
    generator = assemble(
        run,
        member=session.member,
        client=session.client,
        tokenizer=load_tokenizer(run.model),
        receiver=CollectiveReceiver(device="cuda" if is_far and has_gpu else "cpu"),
        fetcher=make_fetcher(run, keys, broker_address=broker_address),
        token=token,
    )
    board.set_source(generator.status)
    loop = asyncio.get_running_loop()
    session.inbox.forward_to(partial(call_threadsafe, loop, generator.receive))
    on_stop_signal(partial(call_threadsafe, loop, generator.drain, "stop signal"))
    exempt_from_collection()
    await generator.run()


def load_engine(run: RunConfig | None, peer_id: str) -> None:
    """Import vLLM, which takes ten seconds, if the local `run` uses it, and prepare the fork of its engine process.

    Ignores errors, which recur at the later import.
    """
    if run is None:
        return
    folder = RunFolder(run)
    folder.record_process(peer_id)
    if isinstance(run.generators.engine, VllmEngineConfig):
        os.environ.update(vllm_environment(run))
        with suppress(Exception), collection_paused():
            from slipstream.generators.engines.vllm.process import start_fork_server

            start_fork_server()
    folder.record_stage(peer_id, "libraries loaded")


# --- local settings of the run ---------------------------------------------------------------------------------------
def wait_for_token(given: RunConfig, overrides: list[str], *, deadline: Deadline) -> tuple[list[RunConfig], str]:
    """Wait for the run. Returns its local settings, those with the broker's address first, and its token.

    Removes secrets from the environment. Raises ConfigError, WaitTimeoutError.
    """
    is_named, address = "name" in _keys(overrides), given.broker.address
    while True:
        known = find_local_run(given, overrides)
        own = [given] if known is None else [given, known] if address else [known, given]
        token = given_token(given.broker) or (find_token(known) if known else "")
        if token and (known or is_named or address):
            # Third-party graders, tools, and environments inherit the environment.
            os.environ.pop(TOKEN_VARIABLE, None)
            os.environ.pop(STORE_PASSWORD_VARIABLE, None)
            return own, token
        if address and is_listening(address):
            raise ConfigError(f"the token must be that of the broker at {address}, got none: {TOKEN_REMEDY}")
        run = f"run {given.name!r}" if is_named else "a run whose broker listens"
        others = f"{describe_others(Path(given.runs_dir), given.name)}; " if is_named and known is None else ""
        missing = (
            f"{run} in {given.runs_dir}/ ({others}start a broker with `python -m slipstream.broker`), or "
            f"broker.address and a token; {TOKEN_REMEDY}"
        )
        deadline.check(missing=missing)
        log.info("waiting", for_=missing)
        time.sleep(min(_LOOK_EVERY_S, deadline.left_s))


def find_local_run(given: RunConfig, overrides: list[str]) -> RunConfig | None:
    """Settings of the run in `runs_dir` to join, None without one, as on another machine.

    The named run, else the newest at the given address, else the newest with a listening broker.
    """
    is_named, address = "name" in _keys(overrides), given.broker.address
    folders = [Path(given.runs_dir) / given.name] if is_named else list_runs(Path(given.runs_dir))
    for folder in folders:
        try:
            found = read_config(folder)
        except ConfigError:
            continue  # from another version, or not written yet
        # The folder may have been moved or renamed.
        found = msgspec.structs.replace(found, runs_dir=given.runs_dir, name=folder.name)
        own_addresses = RunFolder(found).broker_addresses.values()
        # A named run matches at any address, which differs behind a tunnel or relay.
        if is_named or (address in own_addresses if address else any(map(is_listening, own_addresses))):
            return found
    return None


def accept_settings(config_json: str, own: Sequence[RunConfig], overrides: list[str]) -> RunConfig:
    """Decode the broker's settings and apply this machine's model path.

    A broker must not choose the code that runs here. Raises ConfigError for code that is neither built in nor named in
    `own`.
    """
    try:
        run = msgspec.json.decode(config_json, type=RunConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"broker and generator must run the same version of Slipstream: update the older side ({error})."
        ) from None
    harmless = {word for name, path in BUILT_IN.items() if name not in REACHING_OUT for word in (name, path)}
    known = {one.function for o in own for one in o.generators.reward.chosen} | harmless
    for function in (one.function for one in run.generators.reward.chosen if one.function not in known):
        raise ConfigError(
            f"a user's reward function must be named on the generator's machine, got {function!r} only from the "
            f"broker: add generators.reward.function={function} if that code may run here."
        )
    known = {each for o in own for each in o.generators.executed} | {_HARMLESS_TOOL}
    for each in sorted(run.generators.executed - known):
        raise ConfigError(
            f"code and addresses of agents and tools must be named on the generator's machine, got {each!r} only from "
            "the broker: add the run's generators.agent and generators.agents if they may be used here."
        )
    if "model.path" in _keys(overrides):
        own_model = msgspec.structs.replace(run.model, path=load(overrides).model.path)
        run = msgspec.structs.replace(run, model=own_model)
    if run.model.trust_remote_code and not any(
        o.model.trust_remote_code and o.model.path == run.model.path for o in own
    ):
        raise ConfigError(
            f"code in a checkpoint must be trusted on the generator's machine, got trust_remote_code for "
            f"{run.model.path!r} only from the broker: add model.path={run.model.path} model.trust_remote_code=true "
            "if that code may run here."
        )
    return run


def _keys(overrides: list[str]) -> set[str]:
    return {text.lstrip("+").partition("=")[0] for text in overrides}


def ignored_settings(overrides: list[str]) -> list[str]:
    """Overrides that have no effect, because the broker sends these settings."""
    return [text for text in overrides if not text.lstrip("+").startswith(_OWN_SETTINGS)]


def split_id(arguments: list[str]) -> tuple[str, list[str]]:
    """Generator's id and the overrides. Raises ConfigError for `--id` without a name."""
    words = [word for text in arguments for word in (("--id", text[5:]) if text[:5] == "--id=" else (text,))]
    if "--id" not in words:
        return f"generator-{socket.gethostname()}-{os.getpid()}", words
    at = words.index("--id")
    if at + 1 == len(words) or not words[at + 1] or "=" in words[at + 1]:
        raise ConfigError("--id must be followed by a name, got none: write --id NAME.")
    if not re.match(PEER_ID_PATTERN, words[at + 1]):
        raise ConfigError(f"--id must be made of letters, digits and . _ @ : -, got {words[at + 1]!r}.")
    return words[at + 1], words[:at] + words[at + 2 :]


if __name__ == "__main__":
    with ended_beside():
        main(sys.argv[1:])
