"""python -m tests.e2e.family_engine: a process that loads tiny models into vLLM one by one and updates them.

vLLM's engine and worker run in this process, so that a family takes seconds. Separate from the tests, because vLLM
modifies classes of transformers.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from slipstream.broker.messages import Update
from slipstream.broker.weights.checkpoint_names import CheckpointNames, check_layout
from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.vllm.environment import engine_environment
from slipstream.runtime.images import VisionModel

CONFIG = VllmEngineConfig(max_num_seqs=8)


def serve() -> None:
    """Answer one request per line of input: the arguments of `run` as JSON."""
    for line in sys.stdin:
        try:
            answer = run(**json.loads(line))
        except Exception as error:
            answer = {"failure": " ".join(f"{type(error).__name__}: {error}".split())}
        print("ANSWER " + json.dumps(answer), flush=True)


def run(
    folder: str, dtype: str, token_ids: list[int], updates: list[dict[str, Any]], images: list[str] | None = None
) -> dict[str, Any]:
    """Log-probabilities of the tokens at the start and after each update, and the worker's report on each update.

    `images`: files of the pictures in the prompt, which are not expanded yet.
    """
    # Imported here, because vLLM reads the environment at import.
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.inputs import tokens_input
    from vllm.v1.engine.llm_engine import LLMEngine

    from slipstream.generators.engines.vllm.process import engine_arguments, read_checkpoint
    from slipstream.generators.engines.vllm.weights import register

    register()
    model = ModelConfig(max_length=64, path=folder, dtype=dtype)
    _, module = read_checkpoint(model)
    names, max_positions = CheckpointNames(module), module.config.get_text_config().max_position_embeddings
    arguments = engine_arguments(model, CONFIG, seed=0, max_positions=max_positions, reads_text=False)
    if images:
        from slipstream.generators.engines.vllm.patches import image_input

        vision = VisionModel(folder)
        expanded, placed = vision.expand(token_ids, [Path(image).read_bytes() for image in images])
        # Use one name for all updates: vLLM's cached pictures must be dropped with the weights.
        prompt: Any = image_input(expanded, placed, vision=vision, salt="")
    else:
        prompt = tokens_input(token_ids)
    llm: Any = LLMEngine.from_engine_args(arguments)
    try:
        weights = llm.engine_core.engine_core.model_executor.driver_worker.worker
        found, outcomes = [logprobs(llm, prompt)], []
        for update in updates:
            outcomes.append(apply(weights, names, update, dtype=dtype))
            llm.engine_core.engine_core.reset_encoder_cache()
            found.append(logprobs(llm, prompt))
        architecture = type(weights.model_runner.get_model()).__name__
        return {"architecture": architecture, "logprobs": found, "outcomes": outcomes}
    finally:
        llm.engine_core.shutdown()
        weights = llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def apply(weights: Any, names: CheckpointNames, update: dict[str, Any], *, dtype: str) -> list[Any]:
    """Load buckets like generator and worker: check the layout, load, compare, switch."""
    from slipstream.generators.engines.vllm.weights import LoadOrder

    described = msgspec.convert(update["update"], Update)
    check_layout(described.slots, names, dtype=dtype)
    order = LoadOrder(update["fetched_path"], described.bucket_bytes, described.slots, names.tied)
    weights.prepare_weights(msgspec.msgpack.encode(order))
    while (prepared := weights.pop_prepared()) is None:
        time.sleep(0.001)
    outcomes = [prepared, *([] if prepared["error"] else [weights.switch_weights()])]
    error = "".join(outcome["error"] for outcome in outcomes)
    return [error, len(outcomes) == 2, [name for outcome in outcomes for name in outcome["uncompared"]]]


def logprobs(llm: Any, prompt: Any) -> list[float]:
    """Log-probability of every token after the first."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
    llm.add_request("probe", prompt, params)
    outputs: list[Any] = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return list(outputs[-1].prompt_logprobs.logprobs)


if __name__ == "__main__":
    os.environ.update(engine_environment(CONFIG))
    torch.set_num_threads(1)
    serve()
