"""Client of vLLM's processes: starts, calls and ends them."""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.actors.generator.vllm.library import import_from_vllm
from penstock.actors.generator.vllm.options import (
    LORA,
    VllmOptions,
    engine_arguments,
    set_environment,
)
from penstock.actors.generator.vllm.turns import EXTRA, TurnSettings
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.hf.config import CONFIG_FILE
from penstock.actors.runtime.processor_time import processor_s_of
from penstock.messages.errors import ConfigError, DeadlineError

Result = TypeVar("Result")
_CALL_S = 120.0
"""Longest wait for a call to a worker in seconds."""


class VllmClient:
    """Wrapper of one `AsyncLLM`; construct it, then `start()` it."""

    def __init__(self, options: VllmOptions, adapter: AdapterConfig | None = None) -> None:
        self._options, self._adapter = options, adapter
        self._lora: Any = None
        """vLLM's name for the adapter that every request uses."""
        self._llm: Any = None
        self._params: Any = None
        self._pid = 0

    async def start(self, config_text: str, folder: Path, arguments: Sequence[Any]) -> None:
        """Start the processes with random weights; takes about ten seconds.

        Args:
            config_text: config.json of the model.
            folder: Folder to create for the model's configuration, which vLLM reads.
            arguments: Arguments of the worker's `penstock_start`.

        Raises:
            ConfigError: vLLM is not installed here, was built for another device, or does not
                support the model.

        """
        await asyncio.to_thread(folder.mkdir)
        await asyncio.to_thread((folder / CONFIG_FILE).write_text, config_text)
        # Before the first import: vLLM reads these variables when it is imported.
        set_environment(self._options, os.environ)
        device = str(import_from_vllm("platforms.current_platform").device_type)
        if device != self._options.device:
            text = f"expected {device!r}, for which this vLLM was built"
            raise ConfigError(f"generator.device: {text}, got {self._options.device!r}")
        # `TurnSampler` draws the tokens, so vLLM's own sampling settings are neutral.
        self._params = partial(
            import_from_vllm("SamplingParams"),
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=import_from_vllm("sampling_params.RequestOutputKind").DELTA,
        )
        make_arguments = import_from_vllm("engine.arg_utils.AsyncEngineArgs")
        values = make_arguments(**engine_arguments(self._options, folder, self._adapter))
        self._llm = import_from_vllm("v1.engine.async_llm.AsyncLLM").from_engine_args(values)
        self._pid = await self.call("penstock_start", *arguments)

    async def stop(self) -> None:
        """End the processes."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)

    @property
    def error(self) -> str:
        """Error with which the processes ended; empty while they run."""
        return repr(self._llm.dead_error) if self._llm is not None and self._llm.errored else ""

    @property
    def processor_s(self) -> float:
        """CPU seconds of the process of vLLM's first rank, where it computes."""
        return processor_s_of(self._pid)

    def generate(self, prompt: list[int], settings: TurnSettings, cache_salt: str) -> Any:
        """Return an async generator of vLLM's outputs for a turn."""
        sampling = settings.sampling
        params = self._params(
            max_tokens=sampling.num_tokens_max,
            stop_token_ids=list(sampling.stop_token_ids),
            # One column more than the top tokens, for the policy version.
            logprobs=1 + sampling.num_top_logprobs,
            extra_args={EXTRA: msgspec.msgpack.encode(settings)},
        )
        request = {"prompt_token_ids": prompt, "cache_salt": cache_salt}
        return self._llm.generate(request, params, settings.key, lora_request=self._lora)

    async def load_adapter(self, folder: Path) -> None:
        """Have vLLM read the adapter in a PEFT folder in place of the one before.

        Raises:
            DeadlineError: It took too long.

        """
        make_request = import_from_vllm("lora.request.LoRARequest")
        again = make_request(*LORA, str(folder), load_inplace=True)
        await self._within("add_lora", self._llm.add_lora(again))
        self._lora = make_request(*LORA, str(folder))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker and return the result of its first rank.

        Raises:
            DeadlineError: The call took too long.

        """
        return (await self._within(method, self._llm.collective_rpc(method, args=arguments)))[0]

    async def _within(self, what: str, begun: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(_CALL_S):
                return await begun
        except TimeoutError as error:
            raise DeadlineError(f"vLLM: {what} not finished within {_CALL_S:g} s") from error

    async def pause(self) -> None:
        """Freeze all requests after the current step."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Resume all requests."""
        await self._llm.resume_generation()
