"""Preflight: make inputs and check the environment before a run exists."""

import asyncio
import filecmp
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import json
from tokenizers import Tokenizer

from slipstream.broker.dataset import (
    Dataset,
    check_prompt_sizes,
    describe_shortages,
    find_template,
    read_heldout,
    read_train,
)
from slipstream.broker.messages import Row
from slipstream.broker.transport.endpoints import find_interface
from slipstream.broker.transport.zmq_channels import check_free
from slipstream.buffer.archive.replay import plan_replay
from slipstream.buffer.object_folder import check_storage
from slipstream.buffer.redis.run_store import open_run_store, store_url
from slipstream.buffer.trajectory import Reward
from slipstream.cluster.observers import check_observers
from slipstream.cluster.seat import run_kept
from slipstream.configs.base import ConfigError, require
from slipstream.configs.buffer import RedisConfig
from slipstream.configs.data import PrepareStep
from slipstream.configs.generators import RewardConfig, SearchAgentConfig, SingleTurnConfig, ToolsAgentConfig
from slipstream.configs.run import RunConfig
from slipstream.generators.rewards.composition import REACHING_OUT, RewardFunctions
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput
from slipstream.launch.generator_pool import check_placement
from slipstream.runtime.command_line import fail_cleanly
from slipstream.runtime.credentials import find_token
from slipstream.runtime.model_files import check_model_files, check_model_path, find_file
from slipstream.runtime.run_folder import RunFolder

_STEP_TIMEOUT_S = 3600.0
"""Limit of one step; allows a slow download."""
_STORE_TIMEOUT_S = 10.0


def check_surroundings(run: RunConfig) -> None:
    """Check everything in `surroundings`. Raises ConfigError, BrokerError, ReplayBufferError."""
    for check in surroundings(run).values():
        check()


def surroundings(run: RunConfig) -> dict[str, Callable[[], object]]:
    """Name -> check, which takes ten seconds at most and may raise."""
    checks: dict[str, Callable[[], object]] = {
        "observers": lambda: check_observers(run),
        "object store": lambda: check_storage(run, has_folder=RunFolder(run).has_run),
        "rewards": lambda: _check_rewards(run),
        "optimizer": lambda: run.learner.optimizer.check_installed("learner.optimizer"),
    }
    if run.has_roles:
        checks |= {
            "placement": lambda: _check_local(run),
            "token": lambda: find_token(run),
            "address": lambda: _check_address(run),
            "store": lambda: _check_store(run),
        }
    return checks


def _check_rewards(run: RunConfig) -> None:
    # `make_inputs` checks those that read a file still to be made.
    made = [step.creates for step in missing_steps(run)]
    # In a generator's worker, an import error would appear a minute later.
    for reward in filter(None, (run.generators.reward, run.replay.reward)):
        if not any(path in json.encode(reward).decode() for path in made):
            RewardFunctions(reward)


def _check_local(run: RunConfig) -> None:
    if run.cluster.kind != "local":
        return
    machines, must = run.cluster.learner.machines, "be 1 with cluster.kind=local"
    why = "this launcher starts processes only here; use cluster.kind=ray, `slipstream launch`, or start roles by hand"
    require(machines == 1, "cluster.learner.machines", must, got=machines, why=why)
    check_placement(run)


def _check_address(run: RunConfig) -> None:
    # At a used address, our generators would join another run. The lock protects the unix socket.
    if run.cluster.network:
        find_interface(run.cluster)
    for address in RunFolder(run).broker_addresses.values() if run.broker.address else ():
        check_free(address, network=run.cluster.network)


def _check_store(run: RunConfig) -> None:
    if isinstance(run.buffer.store, RedisConfig):
        open_run_store(store_url(run, RunFolder(run).path), run.name, timeout_s=_STORE_TIMEOUT_S).close()


def make_inputs(run: RunConfig) -> None:
    """Run missing steps; check data, model, and a replay's archive. Raises ConfigError."""
    if prepare(run):
        _check_rewards(run)
    train, heldout = read_data(run)
    files = [(file.path, each.path) for file in run.data.train_files for each in run.data.eval_sets]
    for trained, measured in files if run.mode != "evaluate" else []:
        same = "the same file" if trained == measured else f"a copy of {trained}"
        is_fit, got = not filecmp.cmp(trained, measured, shallow=False), f"{measured}, {same} as data.train"
        why = "an evaluation would measure memory; split the file, or measure on another one"
        require(is_fit, "data.eval", "hold prompts that are not trained on", got=got, why=why)
    check_models(run)
    for note in (*describe_shortages(run, heldout), *describe_doubts(run, num_rows=len(train))):
        print(f"note: {note}", flush=True)
    for rows in dict.fromkeys([train, *heldout.values()]):
        check_prompt_sizes(rows, run, is_trial=True)
    # A replay answers no training prompt.
    check_prompts(run, *([train] if run.mode != "replay" else []), *heldout.values())
    try_rewards(run, train)
    if run.mode == "replay":
        plan_replay(run)


def check_models(run: RunConfig) -> None:
    """Check the folders or names of all models, and the layers of an adapter. Raises ConfigError."""
    check_model_path(run.model.path)
    check_model_files(run.model)
    if distillation := run.algorithm.distillation:
        check_model_path(distillation.teacher_path, setting="algorithm.distillation.teacher_path")
    if (second := run.algorithm.second_model) and second.path:
        check_model_path(second.path, setting=f"algorithm.{second.key}.path")
    if run.model.lora and "all-linear" not in run.model.lora.targets:
        # Local, because it loads torch.
        from slipstream.runtime.lora import meta_model

        meta_model(run.model)


def read_data(run: RunConfig) -> tuple[Dataset, dict[str, Dataset]]:
    """Open the prompts and check that the reward functions accept them. Raises ConfigError."""
    train, heldout = read_train(run), read_heldout(run)
    if any(one.data_sources for one in run.generators.reward.functions):
        for rows in dict.fromkeys([train, *heldout.values()]):
            for source in sorted({row.data_source for row in rows}):
                run.generators.reward.check_data_source(source, found_in=rows.paths)
    return train, heldout


_LEARNING_RATES = (1e-8, 1e-2)
"""Bounds; rates outside are almost certainly a mistake."""


def describe_doubts(run: RunConfig, *, num_rows: int | None = None) -> Iterator[str]:
    """Describe settings that are allowed but probably mistaken. `num_rows`: training prompts."""
    rate, (low, high) = run.learner.optimizer.learning_rate, _LEARNING_RATES
    if not low <= rate <= high:
        effect = f"the model will probably {'diverge' if rate > high else 'barely change'}"
        typical = "1e-7 to 1e-5 is typical for all weights of a pretrained model, 1e-6 to 1e-4 for model.lora"
        yield f"learner.optimizer.learning_rate is {rate:g}, and {effect}: {typical}"
    groups, asked = run.claimed_groups_per_step, f"learner.prompts_per_step is {run.learner.prompts_per_step}"
    if num_rows and run.mode != "sft" and groups > num_rows:
        effect = f"every step trains each of them about {groups / num_rows:.3g} times"
        yield f"{asked}, but there are only {num_rows} training prompts: {effect}"
    if run.has_roles and not run.generators.count:
        start = f"`python -m slipstream.generators name={run.name}`, or `slipstream scale generators=1`"
        yield f"generators.count is 0, and training waits until you start a generator: {start}"


_MADE_UP = "I do not know."
_TRIED_ROWS = 64
"""First rows that are checked, and searched for each data source."""


def check_prompts(run: RunConfig, *datasets: Dataset) -> None:
    """Raise ConfigError if a row names no agent, or if its messages cannot be rendered."""
    agents, template = run.generators.agents_by_name, find_template(run.model)
    # A name on the hub may not be in the cache yet.
    is_known = find_file(run.model.path, "tokenizer_config.json") is not None
    for dataset in datasets:
        for row in map(dataset.row, range(min(len(dataset), _TRIED_ROWS))):
            where = f"row {row.uid} of {dataset.paths}"
            if row.agent_name not in agents:
                raise ConfigError(f"{run.generators.describe_missing(row.agent_name, row=where)}.")
            is_fit = not is_known or bool(template) or isinstance(row.prompt, str)
            must, got = f"have a chat template for {where}", f"none in {run.model.path}, for a list of chat messages"
            why = "set model.chat_template to a file, use an instruction-tuned checkpoint, or write prompts as text"
            require(is_fit, "the tokenizer", must, got=got, why=why)


def try_rewards(run: RunConfig, dataset: Dataset) -> None:
    """Score a made-up answer and the truth of one row per data source. Raises ConfigError if a call fails.

    Tries nothing if a function contacts an address or loads a model, or if an agent may score.
    """
    config = run.generators.reward
    if not isinstance(run.generators.agent, SingleTurnConfig | ToolsAgentConfig | SearchAgentConfig):
        return
    if any(function.function in REACHING_OUT for function in config.chosen):
        return
    rows = (dataset.row(index) for index in range(min(len(dataset), _TRIED_ROWS)))
    by_source = {row.data_source: row for row in reversed([*rows]) if not row.agent_name}
    file = find_file(run.model.path, "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file)) if file else None
    for row in by_source.values():
        truth = row.ground_truth if isinstance(row.ground_truth, str) else json.encode(row.ground_truth).decode()
        answers = {text: [0] for text in (_MADE_UP, truth)}
        for text in answers:
            # A tokenizer that lacks these characters may raise a bare Exception; [0] then stands for the text.
            with suppress(Exception):
                answers[text] = list(tokenizer.encode(text).ids) if tokenizer else [0]
        for answer, reward in asyncio.run(_score(config, row, answers)).items():
            if reward.status != "ok":
                must = f"generators.reward ({config.summary}) must score every answer, but {reward.detail}"
                call = f"the call was for row {row.uid} of {dataset.paths} and the answer {answer!r:.60}"
                raise ConfigError(f"{must}; {call}.")


async def _score(config: RewardConfig, row: Row, answers: dict[str, list[int]]) -> dict[str, Reward]:
    """`answers`: text -> token ids."""
    samples = [
        reward_input(row, answer, token_ids, messages=[{"role": "assistant", "content": answer}])
        for answer, token_ids in answers.items()
    ]
    with closing(RewardPool(msgspec.structs.replace(config, num_workers=1))) as pool:
        return dict(zip(answers, await score_group(pool, samples), strict=True))


def missing_steps(run: RunConfig) -> list[PrepareStep]:
    """Preparation steps without their file."""
    return [step for step in run.prepare if not Path(step.creates).exists()]


def preparation_limit_s(run: RunConfig) -> float:
    """Time limit of all missing steps."""
    return _STEP_TIMEOUT_S * len(missing_steps(run))


def prepare(run: RunConfig) -> int:
    """Run missing steps in order; return their number. Raises ConfigError."""
    if not (steps := missing_steps(run)):
        return 0
    limit_s = preparation_limit_s(run)
    # One process for all steps imports torch once, and the launcher never does.
    code = run_kept([__name__, json.encode(steps).decode()], timeout_s=limit_s)
    missing = missing_steps(run)
    if missing or code != 0:
        outcome = f"failed with exit code {code}; its own message is above" if code else "did not"
        outcome += f" within {limit_s:.0f} s" if code is None else ""
        # The first failed step ends the process, possibly after creating its file.
        failed = [*missing, steps[-1]][0]
        shown = f"python -m {failed.module} {' '.join(failed.args)}"
        raise ConfigError(f"prepare step `{shown}` must create {failed.creates}, but {outcome}.")
    return len(steps)


def _run_steps(steps: list[PrepareStep]) -> None:
    """Stop at the first step that does not create its file."""
    for step in steps:
        print(f"prepare: {step.creates} is missing, making it with {step.module}", flush=True)
        sys.argv = [step.module, *step.args]
        try:
            runpy.run_module(step.module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise
        if not Path(step.creates).exists():
            return


if __name__ == "__main__":
    with fail_cleanly():
        _run_steps(json.decode(sys.argv[1], type=list[PrepareStep]))


def reward_input(row: Row, response: str, token_ids: list[int], **others: Any) -> RewardInput:
    """Build the input for a response to a row; `others` extend or replace the row's fields."""
    fields = {"ground_truth": row.ground_truth, "data_source": row.data_source, "extra_info": row.extra_info} | others
    return RewardInput(row.prompt, response, response_token_ids=token_ids, **fields)


async def score_group(pool: RewardPool, group: list[RewardInput]) -> list[Reward]:
    """Score answers to one row, together if the row's function compares them."""
    if group and pool.compares(group[0].data_source):
        return await pool.score_group(group)
    return await asyncio.gather(*map(pool.score, group))
