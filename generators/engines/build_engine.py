"""build_engine: the engine the config names."""

from broker.weights.transport import WeightReceiver
from configs.generators import HfEngineConfig, ScriptedEngineConfig, VllmEngineConfig
from configs.run import RunConfig
from generators.engines.engine import Engine


def build_engine(run: RunConfig, *, receiver: WeightReceiver) -> Engine:
    """An engine, not started. vLLM makes a receiver of its own where its model lives; `receiver` is for the others."""
    # Imported here because torch and vLLM read the environment when they load, and a scripted engine needs neither.
    match run.generators.engine:
        case VllmEngineConfig() as config:
            from generators.engines.vllm_engine import VllmEngine

            return VllmEngine(run.model, config, seed=run.seed)
        case HfEngineConfig() as config:
            from generators.engines.hf_engine import HfEngine

            return HfEngine(run.model, config, receiver=receiver)
        case ScriptedEngineConfig() as config:
            from generators.engines.scripted_engine import ScriptedEngine

            return ScriptedEngine(config, receiver=receiver)
