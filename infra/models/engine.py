"""A generator's inference engine, from `[generator]`. Imports torch."""

from penstock.actors.generator.config import GeneratorConfig
from penstock.actors.generator.engine import Engine
from penstock.actors.generator.masks import GrammarMasks
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.config import PolicyConfig


def start_engine(settings: GeneratorConfig, policy: PolicyConfig, chat: ChatFormat) -> Engine:
    """Start the engine of a replica, which has no weights yet."""
    options = EngineOptions(
        num_running_max=settings.num_running_max,
        num_waiting_max=settings.num_waiting_max,
        num_tokens_max=settings.num_tokens_max,
        num_threads=settings.num_threads,
        device=settings.device,
        probe_tolerance=settings.probe_tolerance,
    )
    masks = GrammarMasks(chat.tokenizer, chat.stop_ids, policy.vocab_size)
    engine = TorchEngine(policy, options, masks)
    engine.start()
    return engine
