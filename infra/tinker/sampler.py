"""Samples with saved adapters, or with the base alone: one embedded engine for each."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import cast

import numpy as np
import safetensors.torch
import torch

from penstock.actors.generator.engine import TokenChunk
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.adapter import is_adapter, tensor_name
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, as_numpy, hf_views
from penstock.actors.policy.model import Policy
from penstock.actors.policy.probe import probe_policy
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.infra.tinker.model import score
from penstock.infra.tinker.requests import SampleBody
from penstock.infra.tinker.wire import Datum, SampledSequence, sample_reply
from penstock.messages.task import Sampling

_SEED_STRIDE = 1 << 64
"""Distance between the seeds of two sequences of one request; larger than between requests."""


def adapted(policy: Policy, data: bytes) -> Policy:
    """Set the adapters of a policy to what was saved for samplers; return it."""
    state = safetensors.torch.load(data)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if is_adapter(name):
                parameter.copy_(state[tensor_name(name)])
    return policy.requires_grad_(False)


class WeightsSampler:
    """Weights to sample with, in an engine of their own that runs from `start` to `stop`."""

    def __init__(self, policy: Policy, tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> None:
        """Prepare.

        Args:
            policy: With the values of its adapters, if it has any.
            tokenizer: Of the base.
            end_ids: Tokens that end a reply unless a request says otherwise.

        """
        self.policy = policy
        self.num_users = 0
        """Requests in progress."""
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._engine: TorchEngine | None = None
        self._context = 0
        self._room = asyncio.Semaphore()

    async def start(self, context: int, num_running: int) -> None:
        """Load the engine and check by probe that it computes what the policy says."""
        # Twice, so that the engine finds the next sequence waiting, and never too many.
        self._context, self._room = context, asyncio.Semaphore(2 * num_running)
        config = self.policy.config
        # No drafts: tenants share samplers, and latency would leak what another tenant wrote.
        options = EngineOptions(
            num_running_max=num_running,
            num_parked_max=0,
            num_tokens_max=context,
            num_drafts_max=0,
        )
        self._engine = TorchEngine(config, options)
        self._engine.start()
        await self._engine.begin_update()
        views = hf_views(self.policy)
        bits = {n: as_numpy(v.to(PUBLISHED_DTYPE).contiguous()) for n, v in views.items()}
        await self._engine.apply(bits)
        # An adapter that never arrives would change no metric; the probe refuses it.
        await self._engine.commit(0, probe=await asyncio.to_thread(probe_policy, self.policy))

    async def stop(self) -> None:
        """End the engine."""
        if self._engine is not None:
            await self._engine.stop()

    async def sample(self, request_id: str, body: SampleBody, seed: int) -> bytes:
        """Return the answer to a request, without the logprobs of its prompt.

        Raises:
            InvalidRequestError: The request does not fit the engine.
            RequestFailedError: It cannot be computed.

        """
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._one(f"{request_id}.{index}", body, seed, index))
                for index in range(body.num_samples)
            ]
        return sample_reply([task.result() for task in tasks])

    async def _one(
        self, request_id: str, body: SampleBody, seed: int, index: int
    ) -> SampledSequence:
        params = body.sampling_params
        prompt = np.array(body.tokens, np.int32)
        stop_ids, texts = self._stops(params.stop)
        sampling = Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            seed=seed + index * _SEED_STRIDE,
            num_tokens_max=min(params.max_tokens or self._context, self._context),
            num_top_logprobs=body.topk_sample_logprobs,
            stop_token_ids=stop_ids,
        )
        assert self._engine is not None, "it has not started"
        async with self._room:
            chunks = self._engine.generate(prompt, sampling, request_id=request_id)
            return await self._collected(chunks, stop_ids, texts)

    def _stops(self, stop: str | list[str | int] | None) -> tuple[tuple[int, ...], list[bytes]]:
        if stop is None:
            return self._end_ids, []
        listed = [stop] if isinstance(stop, str) else stop
        ids = tuple(each for each in listed if isinstance(each, int))
        texts = [each for each in listed if isinstance(each, str) and each]
        tokenizer = self._tokenizer
        special = {t: tokenizer.special_id(t) for t in texts if tokenizer.has_special(t)}
        return (*ids, *special.values()), [t.encode() for t in texts if t not in special]

    async def _collected(
        self, chunks: AsyncIterator[TokenChunk], stop_ids: tuple[int, ...], texts: list[bytes]
    ) -> SampledSequence:
        parts: list[TokenChunk] = []
        # Only the end of the text: all before it has been searched.
        text, num_tokens, longest = b"", 0, max(map(len, texts), default=0)
        cut: int | None = None
        async with aclosing(cast("AsyncGenerator[TokenChunk]", chunks)) as open_chunks:
            async for chunk in open_chunks:
                parts.append(chunk)
                # The first token after which a text is there ends the sequence.
                for token in cast("list[int]", chunk.token_ids.tolist()) if texts else ():
                    num_tokens += 1
                    piece = self._tokenizer.bytes_of(token)
                    text = (text + piece)[-(longest + len(piece)) :]
                    if any(each in text for each in texts):
                        cut = num_tokens
                        break
                if cut is not None:
                    break
        tokens = np.concatenate([each.token_ids for each in parts])
        is_stopped = cut is not None or (tokens.size > 0 and int(tokens[-1]) in stop_ids)
        top = _joined(
            {"ids": [p.top_ids for p in parts], "logprobs": [p.top_logprobs for p in parts]}
        )
        return SampledSequence(
            tokens=tokens[:cut],
            logprobs=np.concatenate([each.behavior_logprobs for each in parts])[:cut],
            is_stopped=is_stopped,
            top_ids=None if top is None else top["ids"][:cut],
            top_logprobs=None if top is None else top["logprobs"][:cut],
        )

    def prompt_logprobs(self, tokens: list[int]) -> np.ndarray:
        """Return the logprobs of a prompt's tokens, float32 [P], NaN for the first."""
        found = np.full(len(tokens), np.nan, np.float32)
        if len(tokens) > 1:
            ids = np.array(tokens, np.int64)
            datum = Datum(tokens=ids[:-1].astype(np.int32), inputs={"target_tokens": ids[1:]})
            with torch.no_grad():
                found[1:] = score(self.policy, [datum]).numpy()
        return found


def _joined(parts: Mapping[str, list[np.ndarray | None]]) -> dict[str, np.ndarray] | None:
    found = {name: [a for a in arrays if a is not None] for name, arrays in parts.items()}
    return {n: np.concatenate(a) for n, a in found.items()} if all(found.values()) else None
