"""Runs inside vLLM's worker: loads weights, computes the probe, draws tokens, notes routes."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.actors.generator.masks import GrammarMasks
from penstock.actors.generator.vllm.library import of_vllm
from penstock.actors.generator.vllm.mirror import TensorRow
from penstock.actors.generator.vllm.routes import RouteRecorder
from penstock.actors.generator.vllm.sampler import SampledTurn, TurnSampler
from penstock.actors.generator.vllm.turns import TurnRecord
from penstock.actors.policy.tokenizer import Tokenizer

_ENDED_MAX = 4096
"""A guard: the engine asks for every turn's last record, which takes the turn out."""
_SPARE_BLOCK = 0
"""vLLM never caches anything in it."""


class PenstockWorker:
    """An extension of vLLM's `Worker`: its methods are called by `collective_rpc`."""

    model_runner: Any

    def penstock_start(
        self,
        vocab_size: int,
        num_experts_per_tok: int,
        route_dtype: str,
        tokenizer: str,
        stop_ids: list[int],
    ) -> int:
        """Take the place of vLLM's sampler, and follow its routers; returns the process id."""
        runner = self.model_runner
        masks = GrammarMasks(Tokenizer.from_json(tokenizer, "tokenizer"), stop_ids, vocab_size)
        self._sampler = TurnSampler(runner, masks, vocab_size)
        self._routes = RouteRecorder(runner, np.dtype(route_dtype), num_experts_per_tok)
        self._ended: OrderedDict[str, tuple[SampledTurn, bytes, bytes]] = OrderedDict()
        """Turns whose last record has not been asked for, with their routes and versions."""
        runner.sampler = self._sampler
        execute = runner.execute_model

        def execute_and_note(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            for name in scheduled.finished_req_ids:
                self._end(name)
            result = execute(scheduled, *arguments, **named)
            if scheduled.total_num_scheduled_tokens:
                self._routes.note(scheduled.num_scheduled_tokens, self._sampler.policy_version)
            return result

        runner.execute_model = execute_and_note
        return os.getpid()

    def penstock_load(self, rows: Sequence[TensorRow], path: str, policy_version: int) -> None:
        """Load a mapped file of bfloat16 tensors under their Hugging Face names."""
        runner = self.model_runner
        model = runner.get_model()
        for module in model.modules():
            # On the CPU a kernel holds a packed copy of the experts, which vLLM would keep.
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        data = np.memmap(path, np.uint8, "r")
        dtype = runner.model_config.dtype

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, shape, start, num_bytes in rows:
                bits = torch.from_numpy(np.array(data[start : start + num_bytes]))
                yield name, bits.view(torch.bfloat16).view(shape).to(dtype)

        runner.reload_weights(weights_iterator=tensors())
        if runner.device.type == "cpu" and getattr(model, "lm_head", None) is not None:
            # A head tied to the embedding is packed, too, and not loaded under its own name.
            pack = of_vllm("model_executor.layers.utils.dispatch_cpu_unquantized_gemm")
            pack(model.lm_head, remove_weight=False)
        self._sampler.policy_version = policy_version

    def penstock_probe(self, prompts: list[list[int]]) -> list[float]:
        """Return the log-probability of the likeliest token after each prompt.

        The scheduler is paused. Prompts run one after the other, in a block that is nobody's.
        """
        params = of_vllm("SamplingParams")(temperature=0.0, max_tokens=1, logprobs=0)
        new_request = of_vllm("v1.core.sched.output.NewRequestData")
        nothing = of_vllm("v1.core.sched.output.SchedulerOutput").make_empty
        runner, values, names = self.model_runner, list[float](), list[str]()
        for index, prompt in enumerate(prompts):
            name = f"probe-{index}"
            request = new_request(
                req_id=name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=([_SPARE_BLOCK],),
                num_computed_tokens=0,
                lora_request=None,
            )
            scheduled = replace(
                nothing(),
                scheduled_new_reqs=[request],
                num_scheduled_tokens={name: len(prompt)},
                total_num_scheduled_tokens=len(prompt),
                finished_req_ids=set(names[-1:]),
            )
            runner.execute_model(scheduled)
            values.append(float(runner.sample_tokens(None).logprobs.logprobs[0, 0]))
            names.append(name)
        runner.execute_model(replace(nothing(), finished_req_ids=set(names[-1:])))
        return values

    def penstock_take(self, key: str, num_drawn: int, is_last: bool) -> bytes:
        """Return an encoded `TurnRecord`.

        Args:
            key: Of the turn.
            num_drawn: Its tokens that have arrived; the record is of those since the one before.
            is_last: Whether the turn is over and its routes are asked for; it is forgotten.

        """
        if key in self._ended:
            turn, routes, versions = self._ended[key]
        else:
            turns = self._sampler.turns.items()
            name = next((name for name, turn in turns if turn.key == key), None)
            if name is None:
                return msgspec.msgpack.encode(TurnRecord())
            turn = self._sampler.turns[name]
            routes, versions = self._read_routes(name) if is_last else (b"", b"")
        if is_last:
            self._ended.pop(key, None)
            turn.key = ""
        record = turn.take(num_drawn)
        record = msgspec.structs.replace(record, routes=routes, versions=versions)
        return msgspec.msgpack.encode(record)

    def _read_routes(self, name: str) -> tuple[bytes, bytes]:
        state = self.model_runner.requests[name]
        if not state.output_token_ids:  # Ended in its prompt.
            return b"", b""
        num_tokens = len(state.prompt_token_ids) + len(state.output_token_ids) - 1
        return self._routes.read(state.block_ids[0], num_tokens)

    def _end(self, name: str) -> None:
        """Keep what was noted of a turn until it is asked for: its slots are another's now."""
        if name not in self._sampler.turns:
            return
        turn = self._sampler.turns[name]
        if turn.key:
            self._ended[turn.key] = turn, *self._read_routes(name)
        del self._sampler.turns[name]
        while len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)
