"""A generator's inference engine, from `[generator]`. Imports torch."""

from typing import Any

import msgspec

from penstock.actors.generator.config import GeneratorConfig
from penstock.actors.generator.engine import Engine
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.sampler import GrammarMasks
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.generator.vllm.engine import VllmEngine
from penstock.actors.generator.vllm.options import VllmOptions
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.config import PolicyConfig


async def start_engine(
    settings: GeneratorConfig, policy: PolicyConfig, chat: ChatFormat, config_text: str = ""
) -> Engine:
    """Start the engine of a replica, which has no weights yet.

    Args:
        settings: Of the generator.
        policy: Shape of the policy.
        chat: Its chat format.
        config_text: Its config.json (`published_config`), which vLLM needs for other architectures
            than the built-in policy's.

    Raises:
        ConfigError: The engine does not compute this policy, or is not installed here.

    """
    if settings.engine == "vllm":
        return await _start_vllm(settings, policy, chat, config_text)
    options = EngineOptions(
        num_running_max=settings.num_running_max,
        num_waiting_max=settings.num_waiting_max,
        num_tokens_max=settings.num_tokens_max,
        num_drafts_max=settings.num_drafts_max,
        num_threads=settings.num_threads,
        probe_tolerance=settings.probe_tolerance,
    )
    masks = GrammarMasks(chat.tokenizer, chat.stop_ids, policy.vocab_size)
    engine = TorchEngine(policy, options, masks)
    engine.start()
    return engine


def _vllm_settings(settings: GeneratorConfig, policy: PolicyConfig) -> dict[str, Any]:
    """Return vLLM's own settings by name; exact numerics need batches that change no bit."""
    table: dict[str, Any] = msgspec.structs.asdict(settings.vllm)
    table["batch_invariant"] = settings.vllm.batch_invariant or policy.numerics.is_exact
    return table


async def _start_vllm(
    settings: GeneratorConfig, policy: PolicyConfig, chat: ChatFormat, config_text: str
) -> VllmEngine:
    options = VllmOptions(
        num_running_max=settings.num_running_max,
        num_waiting_max=settings.num_waiting_max,
        num_tokens_max=settings.num_tokens_max,
        num_threads=settings.num_threads,
        probe_tolerance=settings.probe_tolerance,
        device=settings.device,
        observes_routes=bool(policy.num_experts),
        **_vllm_settings(settings, policy),
    )
    engine = VllmEngine(policy, options, chat.tokenizer, list(chat.stop_ids), config_text)
    await engine.start()
    return engine
