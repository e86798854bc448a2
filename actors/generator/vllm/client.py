"""vLLM's processes as one engine starts, calls and ends them."""

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.generator.vllm.library import of_vllm
from penstock.actors.generator.vllm.options import VllmOptions, engine_arguments, set_environment
from penstock.actors.generator.vllm.turns import EXTRA, TurnSettings
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import CONFIG_FILE, config_json
from penstock.actors.runtime.processor_time import processor_s_of
from penstock.messages.errors import ConfigError, DeadlineError

_CALL_S = 120.0
"""Longest wait for what a worker is asked to do."""


class VllmClient:
    """One `AsyncLLM`; construct it, then `start()`."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._llm: Any = None
        self._params: Any = None
        self._pid = 0

    async def start(self, config: PolicyConfig, folder: Path, arguments: Sequence[Any]) -> None:
        """Start the processes, whose weights are random; takes some ten seconds.

        Args:
            config: Of the policy.
            folder: Made, for the model as vLLM reads it.
            arguments: Of the worker's `penstock_start`.

        Raises:
            ConfigError: vLLM is not installed here, was built for another device, or cannot do
                what is asked of it.

        """
        await asyncio.to_thread(folder.mkdir)
        await asyncio.to_thread((folder / CONFIG_FILE).write_text, config_json(config))
        set_environment(self._options, os.environ)
        device = str(of_vllm("platforms.current_platform").device_type)
        if device != self._options.device:
            text = f"expected {device!r}, for which this vLLM was built"
            raise ConfigError(f"generator.device: {text}, got {self._options.device!r}")
        self._params = partial(
            of_vllm("SamplingParams"),
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=of_vllm("sampling_params.RequestOutputKind").DELTA,
        )
        make_arguments = of_vllm("engine.arg_utils.AsyncEngineArgs")
        values = make_arguments(**engine_arguments(self._options, folder))
        self._llm = of_vllm("v1.engine.async_llm.AsyncLLM").from_engine_args(values)
        self._pid = await self.call("penstock_start", *arguments)

    async def stop(self) -> None:
        """End the processes."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)

    @property
    def error(self) -> str:
        """Why the processes ended; empty while they run."""
        return repr(self._llm.dead_error) if self._llm is not None and self._llm.errored else ""

    @property
    def processor_s(self) -> float:
        """What vLLM's process has used; it computes in its first rank's."""
        return processor_s_of(self._pid)

    def generate(self, prompt: list[int], settings: TurnSettings, cache_salt: str) -> Any:
        """Return vLLM's outputs of a turn, as an async generator."""
        sampling = settings.sampling
        params = self._params(
            max_tokens=sampling.num_tokens_max,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=1 + sampling.num_top_logprobs,
            extra_args={EXTRA: msgspec.msgpack.encode(settings)},
        )
        request = {"prompt_token_ids": prompt, "cache_salt": cache_salt}
        return self._llm.generate(request, params, settings.key)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Have the worker do something; returns what its first rank says.

        Raises:
            DeadlineError: It does not.

        """
        try:
            async with asyncio.timeout(_CALL_S):
                return (await self._llm.collective_rpc(method, args=arguments))[0]
        except TimeoutError as error:
            raise DeadlineError(f"vLLM: {method} not done within {_CALL_S} s") from error

    async def pause(self) -> None:
        """Freeze all requests; returns between two steps."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on with them."""
        await self._llm.resume_generation()
