"""Runs inside vLLM's worker: loads weights, computes the probe, draws tokens, notes routes.

Notes which experts computed every token, by the slot of vLLM's cache that holds it.

A slot holds the keys and values of one token, so a request that reuses a cached prefix reuses its
routes, and nothing has to be known of requests until one ends.

Draws tokens inside vLLM's worker, in place of its sampler.

A token is a function of its logits, its settings and its place in the turn alone: a request that
vLLM preempts, freezes or prefills in parts draws the same numbers as one that it does not. What is
neither token nor log-probability travels as pairs (id, log-probability) beside the sampled one,
which vLLM passes on as its own likeliest tokens: first V + policy version, then the top tokens.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.actors.generator.engine import InvalidRequestError
from penstock.actors.generator.sampler import (
    GrammarMasks,
    SamplingBatch,
    Shaped,
    TurnShaper,
    finite_rows,
    sample,
    top_tokens,
    uniforms_for,
)
from penstock.actors.generator.vllm.library import of_vllm
from penstock.actors.generator.vllm.mirror import TensorRow
from penstock.actors.generator.vllm.turns import EXTRA, TurnRecord, TurnSettings
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.errors import ConfigError
from penstock.messages.task import Sampling


class RouteRecorder:
    """Routes and versions of all slots of one worker's cache."""

    def __init__(self, runner: Any, route_dtype: np.dtype, num_per_token: int) -> None:
        """Attach to the routers of the runner's model.

        Args:
            runner: vLLM's model runner.
            route_dtype: Of the policy's routes.
            num_per_token: Experts of a token in each layer; 0 in a dense model.

        Raises:
            ConfigError: A router whose choice cannot be seen.

        """
        self._runner = runner
        self._block = runner.cache_config.block_size
        routers = _routers(runner.get_model())
        if num_per_token and not routers:
            text = "expected a model whose routers can be followed; router replay needs them"
            raise ConfigError(f"generator.engine vllm: {text}")
        for index, router in enumerate(routers):
            router.set_capture_fn(partial(self._capture, index))
        self._step: list[torch.Tensor | None] = [None] * len(routers)
        num_slots = self._block * runner.kv_cache_config.num_blocks
        self._routes = np.zeros((num_slots, len(routers), num_per_token), route_dtype)
        self._versions = np.zeros(num_slots, np.int32)

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._step[layer] = experts

    def note(self, num_scheduled: dict[str, int], policy_version: int) -> None:
        """Take in a step that was computed: how many tokens of each request."""
        spans: list[np.ndarray] = []
        for name in self._runner.input_batch.req_ids:
            state = self._runner.requests[name]
            start = state.num_computed_tokens
            spans.append(self._slots(state.block_ids[0], start, start + num_scheduled[name]))
        slots = np.concatenate(spans)
        self._versions[slots] = policy_version
        for layer, experts in enumerate(self._step):
            assert experts is not None, "every layer routes in every step"
            self._routes[slots, layer] = experts[: len(slots)].cpu().numpy()

    def read(self, block_ids: Sequence[int], num_tokens: int) -> tuple[bytes, bytes]:
        """Return routes and versions of a request's first tokens, as bytes."""
        slots = self._slots(block_ids, 0, num_tokens)
        return self._routes[slots].tobytes(), self._versions[slots].tobytes()

    def _slots(self, block_ids: Sequence[int], start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = np.array(block_ids, np.int64)[positions // self._block]
        return blocks * self._block + positions % self._block


def _routers(model: torch.nn.Module) -> list[Any]:
    """Return the routers of a model, in the order of its layers."""
    layers = "model_executor.layers.fused_moe"
    moe_runner = of_vllm(f"{layers}.layer.MoERunner")
    base_router = of_vllm(f"{layers}.router.base_router.BaseRouter")
    runners: list[Any] = [module for module in model.modules() if isinstance(module, moe_runner)]
    for runner in runners:
        if runner.is_monolithic or not isinstance(runner.router, base_router):
            name = type(runner.router).__name__
            text = f"the experts of {name} choose inside a kernel, where router replay cannot see"
            raise ConfigError(f"generator.engine vllm: {text}")
    return [runner.router for runner in runners]


NO_NUMBERS = "the logits of its context are no finite numbers"
_DECODER = msgspec.msgpack.Decoder(TurnSettings)
_PROBE = Sampling(temperature=0.0, num_tokens_max=1)


class SampledTurn:
    """One request, as the sampler sees it."""

    def __init__(self, state: Any, masks: GrammarMasks, vocab_size: int) -> None:
        """Take vLLM's state of the request.

        Raises:
            InvalidRequestError: Its grammar does not compile, or not allow what it has already.

        """
        extra = state.sampling_params.extra_args or {}
        settings = _DECODER.decode(extra[EXTRA]) if EXTRA in extra else TurnSettings("", _PROBE)
        self.key, self.sampling = settings.key, settings.sampling
        self.uniforms = uniforms_for(self.sampling, settings.num_resumed)
        self.fault, self.is_refused = "", False
        self._noted: dict[int, Shaped] = {}
        """By place in the turn: what could be drawn there."""
        self._num_taken = self._num_seen = 0
        self._shaper: TurnShaper | None = None
        try:
            grammar = self.sampling.grammar
            open_grammar = masks.open_now(grammar.text) if grammar else None
            self._shaper = TurnShaper.of(self.sampling, open_grammar)
            if self._shaper is not None:
                context = np.array(state.prompt_token_ids, np.int32)
                self._shaper.begin(context, vocab_size, settings.num_resumed)
        except InvalidRequestError as error:
            self._fail(error)

    def shape(self, drawn: list[int], row: torch.Tensor) -> None:
        """Shape the logits [V] of the token after those that were drawn, in place."""
        if self._shaper is None or self.fault:
            return
        try:
            for token_id in drawn[self._num_seen :]:
                self._shaper.accept(token_id)
                self._num_seen += 1
            self._noted[len(drawn)] = self._shaper.shape(row)
        except InvalidRequestError as error:
            self._fail(error)

    def take(self, num_drawn: int) -> TurnRecord:
        """Return what was noted since the last time."""
        places = range(self._num_taken, num_drawn)
        noted = [self._noted.pop(place) for place in places if place in self._noted]
        self._num_taken = num_drawn
        return TurnRecord(
            supports=b"".join(one.support.tobytes() for one in noted if one.support is not None),
            forced=bytes(one.is_forced for one in noted),
            fault=self.fault,
            is_refused=self.is_refused,
        )

    def _fail(self, error: InvalidRequestError) -> None:
        self.fault, self.is_refused = str(error), True


class TurnSampler:
    """Stands in vLLM's model runner where its `Sampler` does."""

    def __init__(self, runner: Any, masks: GrammarMasks, vocab_size: int) -> None:
        self._runner = runner
        self._masks = masks
        self._vocab_size = vocab_size
        self.policy_version = -1
        self.turns: dict[str, SampledTurn] = {}
        """By vLLM's name of the request."""

    def __call__(self, logits: torch.Tensor, **_: Any) -> Any:
        """Draw a token for each row [N, V]; returns vLLM's `SamplerOutput`."""
        states = [self._runner.requests[name] for name in self._runner.input_batch.req_ids]
        turns = [self._turn(state) for state in states[: len(logits)]]
        rows = logits[:, : self._vocab_size].to("cpu", torch.float32)
        rows = rows.clone() if rows.data_ptr() == logits.data_ptr() else rows
        self._shape(turns, states, rows)
        width = max(turn.sampling.num_top_logprobs for turn in turns)
        ids = torch.zeros(len(turns), 2 + width, dtype=torch.int64)
        values = torch.zeros(len(turns), 2 + width)
        for index, turn in enumerate(turns):
            if count := turn.sampling.num_top_logprobs:
                top_ids, top_values = top_tokens(rows[index], turn.sampling.temperature, count)
                ids[index, 2 : 2 + count] = torch.from_numpy(top_ids)
                values[index, 2 : 2 + count] = torch.from_numpy(top_values)
        tokens, logprobs = sample(rows, self._batch(turns, states))
        is_whole = torch.tensor([not turn.fault for turn in turns])
        ids[:, 0] = torch.tensor(tokens)
        ids[:, 1] = self._vocab_size + self.policy_version
        values[:, 0] = torch.tensor(logprobs).where(is_whole, torch.nan)
        sampled = ids[:, :1].to(logits.device, torch.int32)
        ranks = torch.zeros(len(turns), dtype=torch.int64)
        tensors = of_vllm("v1.outputs.LogprobsTensors")(ids, values, ranks)
        output = of_vllm("v1.outputs.SamplerOutput")
        return output(sampled_token_ids=sampled, logprobs_tensors=tensors)

    def _turn(self, state: Any) -> SampledTurn:
        turn = self.turns.get(state.req_id)
        if turn is None:
            turn = self.turns[state.req_id] = SampledTurn(state, self._masks, self._vocab_size)
        return turn

    @staticmethod
    def _shape(turns: list[SampledTurn], states: list[Any], rows: torch.Tensor) -> None:
        is_finite = finite_rows(rows)
        for index, (turn, state) in enumerate(zip(turns, states, strict=False)):
            if not is_finite[index]:
                rows[index] = 0.0
                turn.fault = NO_NUMBERS
            else:
                turn.shape(state.output_token_ids, rows[index])
            if turn.fault:
                rows[index] = 0.0

    @staticmethod
    def _batch(turns: list[SampledTurn], states: list[Any]) -> SamplingBatch:
        places = [len(state.output_token_ids) for state in states]
        return SamplingBatch(
            temperatures=[turn.sampling.temperature for turn in turns],
            uniforms=[
                turn.uniforms[min(place, len(turn.uniforms) - 1)]
                for turn, place in zip(turns, places, strict=False)
            ],
        )


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
