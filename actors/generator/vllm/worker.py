"""Extension of vLLM's worker: loads weights, computes the probe, samples tokens, records routes.

`RouteRecorder` notes which experts computed each token, by the slot of vLLM's KV cache that holds
it. A slot has the keys and values of one token, so a request that reuses a cached prefix also
reuses its routes, and requests need no bookkeeping until they end.

`TurnSampler` replaces vLLM's sampler. A token depends only on its logits, the settings and its
position in the turn. So a request that vLLM preempts, freezes or prefills in parts draws the same
tokens as one that runs undisturbed. Further values travel as (id, log-probability) pairs next to
the sampled token, which vLLM passes on as if they were its most likely tokens: first V + policy
version, then the top tokens.
"""

import logging
import os
import re
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
    PositionSupport,
    SamplingBatch,
    TurnShaper,
    finite_rows,
    sample,
    top_tokens,
    uniforms_for,
)
from penstock.actors.generator.vllm.library import import_from_vllm
from penstock.actors.generator.vllm.mirror import TensorChange, TensorRow
from penstock.actors.generator.vllm.options import LORA
from penstock.actors.generator.vllm.turns import EXTRA, TurnRecord, TurnSettings
from penstock.actors.policy.adapter import PREFIX as ADAPTER_PREFIX
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.kernels.ops import delta_apply, raise_deferred_errors, routes_pack
from penstock.kernels.reference.routing import bits_per_id
from penstock.messages.errors import ConfigError
from penstock.messages.task import Sampling

log = logging.getLogger(__name__)


class RouteRecorder:
    """Routes and weight versions of all slots of a worker's KV cache."""

    def __init__(self, runner: Any, num_layers: int, num_experts: int, num_per_token: int) -> None:
        """Attach to the routers of the runner's model.

        Args:
            runner: Model runner of vLLM.
            num_layers: Layers of the model, of which some may have no router.
            num_experts: Experts per layer.
            num_per_token: Experts per token in each layer; 0 in a dense model.

        Raises:
            ConfigError: The model has a router whose choice cannot be observed.

        """
        self._runner = runner
        self._block = runner.cache_config.block_size
        routers = _routers(runner.get_model()) if num_per_token else {}
        if num_per_token and not routers:
            text = (
                "expected a model whose routers can be observed; router replay needs their choice"
            )
            raise ConfigError(f"generator.engine vllm: {text}")
        self._step: dict[int, torch.Tensor] = {}
        """Experts of the last step's tokens, by layer."""
        for layer, router in routers.items():
            router.set_capture_fn(partial(self._capture, layer))
        self._num_layers, self._num_routers = num_layers, len(routers)
        self._num_experts = num_experts
        num_slots = self._block * runner.kv_cache_config.num_blocks
        bits = num_layers * num_per_token * bits_per_id(num_experts)
        self._routes = np.zeros((num_slots, -(-bits // 8)), np.uint8)
        """Packed routes of each slot."""
        self._versions = np.zeros(num_slots, np.int32)

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._step[layer] = experts

    def note(self, num_scheduled: dict[str, int], policy_version: int) -> None:
        """Record the routes of a step that was computed.

        Args:
            num_scheduled: Number of tokens of each request in the step, by vLLM's request name.
            policy_version: Version of the weights that computed it.

        """
        spans: list[np.ndarray] = []
        for name in self._runner.input_batch.req_ids:
            state = self._runner.requests[name]
            start = state.num_computed_tokens
            spans.append(self._slots(state.block_ids[0], start, start + num_scheduled[name]))
        slots = np.concatenate(spans)
        self._versions[slots] = policy_version
        if self._num_routers:
            assert len(self._step) == self._num_routers, "every router routes in every step"
            nothing = torch.zeros_like(next(iter(self._step.values())))
            layers = [self._step.get(layer, nothing) for layer in range(self._num_layers)]
            # Packed where they are: one small copy to the host instead of one per layer.
            routes = torch.stack([experts[: len(slots)] for experts in layers], dim=1)
            self._routes[slots] = routes_pack(routes, self._num_experts).cpu().numpy()

    def read(self, block_ids: Sequence[int], num_tokens: int) -> tuple[bytes, bytes]:
        """Return the packed routes and the versions of a request's first tokens, as bytes."""
        slots = self._slots(block_ids, 0, num_tokens)
        return self._routes[slots].tobytes(), self._versions[slots].tobytes()

    def _slots(self, block_ids: Sequence[int], start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = np.array(block_ids, np.int64)[positions // self._block]
        return blocks * self._block + positions % self._block


def _routers(model: torch.nn.Module) -> dict[int, Any]:
    """Return the routers of a model by layer."""
    layers = "model_executor.layers.fused_moe"
    moe_runner = import_from_vllm(f"{layers}.layer.MoERunner")
    base_router = import_from_vllm(f"{layers}.router.base_router.BaseRouter")
    runners: dict[int, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, moe_runner) and (found := _LAYER.search(name)):
            runners[int(found[1])] = module
    for runner in runners.values():
        if runner.is_monolithic or not isinstance(runner.router, base_router):
            name = type(runner.router).__name__
            text = f"{name} chooses experts inside a kernel, where router replay cannot observe it"
            raise ConfigError(f"generator.engine vllm: {text}")
    return {layer: runner.router for layer, runner in runners.items()}


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
NON_FINITE_LOGITS = "the logits for the request's context are not finite"
_DECODER = msgspec.msgpack.Decoder(TurnSettings)
_PROBE = Sampling(temperature=0.0, num_tokens_max=1)


class SampledTurn:
    """Sampling state of one request."""

    def __init__(self, state: Any, masks: GrammarMasks, vocab_size: int) -> None:
        """Initialize from vLLM's state of the request.

        If the grammar does not compile or does not allow the tokens that the turn already has, the
        turn gets a `fault`.
        """
        # Requests without settings are those of the probe.
        extra = state.sampling_params.extra_args or {}
        settings = _DECODER.decode(extra[EXTRA]) if EXTRA in extra else TurnSettings("", _PROBE)
        self.key, self.sampling = settings.key, settings.sampling
        self.uniforms = uniforms_for(self.sampling, settings.num_resumed)
        self.fault, self.is_refused = "", False
        self._noted: dict[int, PositionSupport] = {}
        """Support of each position, by the position's index in the turn."""
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

    @property
    def is_shaped(self) -> bool:
        """Whether logits are shaped before a token is drawn."""
        return self._shaper is not None

    def shape(self, drawn: list[int], row: torch.Tensor) -> None:
        """Shape in place the logits [V], on the host, of the token that follows `drawn`."""
        if self._shaper is None or self.fault:
            return
        try:
            # A position may be shaped again, e.g. after a preemption: accept each token only once.
            for token_id in drawn[self._num_seen :]:
                self._shaper.accept(token_id)
                self._num_seen += 1
            self._noted[len(drawn)] = self._shaper.shape(row)
        except InvalidRequestError as error:
            self._fail(error)

    def take(self, num_drawn: int) -> TurnRecord:
        """Return the record of the tokens since the last call, up to the first `num_drawn`."""
        places = range(self._num_taken, num_drawn)
        noted = [self._noted.pop(place) for place in places if place in self._noted]
        self._num_taken = num_drawn
        return TurnRecord(
            supports=b"".join(
                shaped.support.tobytes() for shaped in noted if shaped.support is not None
            ),
            forced=bytes(shaped.is_forced for shaped in noted),
            fault=self.fault,
            is_refused=self.is_refused,
        )

    def _fail(self, error: InvalidRequestError) -> None:
        self.fault, self.is_refused = str(error), True


class TurnSampler:
    """Replacement for the `Sampler` of vLLM's model runner."""

    def __init__(self, runner: Any, masks: GrammarMasks, vocab_size: int) -> None:
        self._runner = runner
        self._masks = masks
        self._vocab_size = vocab_size
        self.policy_version = -1
        self.turns: dict[str, SampledTurn] = {}
        """Turns in progress, by vLLM's request name."""

    def __call__(self, logits: torch.Tensor, **_: Any) -> Any:
        """Sample a token for each row of [N, V] and return vLLM's `SamplerOutput`."""
        states = [self._runner.requests[name] for name in self._runner.input_batch.req_ids]
        turns = [self._turn(state) for state in states[: len(logits)]]
        # On the logits' own device: copying [N, V] to the host would take longer than the step.
        rows = logits[:, : self._vocab_size].float()
        # Shaping and sampling overwrite the rows; vLLM's own logits must stay as they are.
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
        # NaN marks a token that could not be drawn (`DrawnToken.is_fault`).
        is_whole = torch.tensor([not turn.fault for turn in turns])
        ids[:, 0] = torch.tensor(tokens)
        # An id beyond the vocabulary carries the version to `DrawnToken`.
        ids[:, 1] = self._vocab_size + self.policy_version
        values[:, 0] = torch.tensor(logprobs).where(is_whole, torch.nan)
        sampled = ids[:, :1].to(logits.device, torch.int32)
        ranks = torch.zeros(len(turns), dtype=torch.int64)
        tensors = import_from_vllm("v1.outputs.LogprobsTensors")(ids, values, ranks)
        output = import_from_vllm("v1.outputs.SamplerOutput")
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
            # Zeros keep the batch valid; the token drawn from them is dropped.
            if not is_finite[index]:
                rows[index] = 0.0
                turn.fault = NON_FINITE_LOGITS
            elif turn.is_shaped:
                # Masks and penalties are the host's.
                row = rows[index].cpu()
                turn.shape(state.output_token_ids, row)
                rows[index] = row
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


_INTEGERS = {2: np.int16, 4: np.int32}


def _element_bytes(shape: Sequence[int], num_bytes: int) -> int:
    """Return the size of an element: 2 of bfloat16, or 4 of float32, as routers' biases are."""
    return num_bytes // max(int(np.prod(shape)), 1)


def _typed(bits: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """View the bits of a published tensor in its dtype and shape."""
    is_float32 = _element_bytes(shape, bits.nbytes) == 4
    return bits.view(torch.float32 if is_float32 else torch.bfloat16).view(list(shape))


class DeviceWeights:
    """The published weights on a worker's card, patched there by each version's changes.

    vLLM fuses and may transpose tensors, so what it computes with is no place to patch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def update(
        self, rows: Sequence[TensorRow], data: np.ndarray, changes: Sequence[TensorChange]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a version, by name; they stay this object's.

        Args:
            rows: Places of all tensors in `data`.
            data: Bytes of the version, on the host.
            changes: Changes since the version before; what was not sent before is sent whole.

        """
        patches = {name: positions for name, positions in changes if len(positions)}
        whole = {name for name, positions in changes if not len(positions)}
        sent, self._tensors = self._tensors, {}
        for name, shape, start, num_bytes in rows:
            bits = data[start : start + num_bytes].view(_INTEGERS[_element_bytes(shape, num_bytes)])
            tensor = sent.get(name)
            if tensor is None or name in whole:
                tensor = torch.from_numpy(np.array(bits)).to(self._device, copy=True)
            elif (positions := patches.get(name)) is not None:
                places = np.frombuffer(positions, np.int32)
                values = torch.from_numpy(bits[places]).to(self._device)
                on_device = torch.from_numpy(places.copy()).to(self._device)
                delta_apply(tensor, on_device, values)
            sent[name] = tensor
        raise_deferred_errors()
        # Only now: after an error nothing counts as sent.
        self._tensors = sent
        return {name: _typed(sent[name], shape) for name, shape, _, _ in rows}


_ENDED_MAX = 4096
"""Maximum ended turns kept. A safety bound: the engine asks for the last record of every turn,
which removes the turn."""
_SPARE_BLOCK = 0
"""Block of the KV cache that vLLM never uses for requests."""


class PenstockWorker:
    """Extension of vLLM's `Worker`, whose methods are called with `collective_rpc`."""

    model_runner: Any

    def penstock_start(
        self,
        vocab_size: int,
        routing: Sequence[int],
        tokenizer: str,
        stop_ids: list[int],
    ) -> int:
        """Replace vLLM's sampler and observe its routers; return the process id.

        Args:
            vocab_size: Ids of the model.
            routing: Layers, experts of a layer, experts of a token.
            tokenizer: Its `tokenizer.json`.
            stop_ids: Tokens that end a turn.

        """
        runner = self.model_runner
        masks = GrammarMasks(Tokenizer.from_json(tokenizer, "tokenizer"), stop_ids, vocab_size)
        self._sampler = TurnSampler(runner, masks, vocab_size)
        self._routes = RouteRecorder(runner, *routing)
        self._weights, self._has_base = DeviceWeights(runner.device), False
        self._ended: OrderedDict[str, tuple[SampledTurn, bytes, bytes]] = OrderedDict()
        """Ended turns whose last record was not fetched yet, with their routes and versions."""
        runner.sampler = self._sampler
        execute = runner.execute_model

        def execute_and_note(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            # Before the step: vLLM frees the slots of ended requests and may reuse them in it.
            for name in scheduled.finished_req_ids:
                self._end(name)
            result = execute(scheduled, *arguments, **named)
            if scheduled.total_num_scheduled_tokens:
                self._routes.note(scheduled.num_scheduled_tokens, self._sampler.policy_version)
            return result

        runner.execute_model = execute_and_note
        return os.getpid()

    def penstock_load(
        self,
        rows: Sequence[TensorRow],
        path: str,
        changes: Sequence[TensorChange],
        policy_version: int,
    ) -> None:
        """Load the weights from a mapped file of bfloat16 tensors with Hugging Face names.

        On a GPU only what changed is copied to it.
        """
        runner = self.model_runner
        self._sampler.policy_version = policy_version
        rows = [row for row in rows if not row[0].startswith(ADAPTER_PREFIX)]
        if self._has_base and all(name.startswith(ADAPTER_PREFIX) for name, _ in changes):
            return  # vLLM reads the adapter by itself.
        self._has_base = False
        model = runner.get_model()
        for module in model.modules():
            # On the CPU a kernel holds a packed copy of the experts; vLLM would keep the old one.
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        data = np.memmap(path, np.uint8, "r")
        dtype = runner.model_config.dtype

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            if runner.device.type != "cpu":
                for name, tensor in self._weights.update(rows, data, changes).items():
                    yield name, tensor.to(dtype)
                return
            for name, shape, start, num_bytes in rows:
                bits = torch.from_numpy(np.array(data[start : start + num_bytes]))
                yield name, _typed(bits, shape).to(dtype)

        runner.reload_weights(weights_iterator=tensors())
        if runner.device.type == "cpu" and getattr(model, "lm_head", None) is not None:
            # A head tied to the embedding is packed, too, but not loaded under its own name.
            pack = import_from_vllm("model_executor.layers.utils.dispatch_cpu_unquantized_gemm")
            pack(model.lm_head, remove_weight=False)
        self._has_base = True
        log.info("loaded version %d, %d tensors", policy_version, len(rows))

    def penstock_probe(self, prompts: list[list[int]]) -> list[float]:
        """Return the log-probability of the most likely token after each prompt.

        The scheduler must be paused. Prompts run one after the other in a block of the KV cache
        that belongs to no request.
        """
        params = import_from_vllm("SamplingParams")(temperature=0.0, max_tokens=1, logprobs=0)
        new_request = import_from_vllm("v1.core.sched.output.NewRequestData")
        nothing = import_from_vllm("v1.core.sched.output.SchedulerOutput").make_empty
        runner, values, names = self.model_runner, list[float](), list[str]()
        lora = import_from_vllm("lora.request.LoRARequest")(*LORA, "-")
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
                lora_request=lora if runner.lora_config else None,
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
        """Return the next `TurnRecord` of a turn, encoded.

        Args:
            key: Key of the turn.
            num_drawn: Number of the turn's tokens that have arrived; the record covers those that
                came since the previous record.
            is_last: Whether the turn is over; its routes are added and it is forgotten.

        """
        # A turn may end in the worker before the engine has read its last tokens.
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
        # Aborted during its prefill: there is no last chunk that could carry routes.
        if not state.output_token_ids:
            return b"", b""
        num_tokens = len(state.prompt_token_ids) + len(state.output_token_ids) - 1
        return self._routes.read(state.block_ids[0], num_tokens)

    def _end(self, name: str) -> None:
        """Save the record of an ended turn until it is fetched: its cache slots will be reused."""
        if name not in self._sampler.turns:
            return
        turn = self._sampler.turns[name]
        if turn.key:
            self._ended[turn.key] = turn, *self._read_routes(name)
        del self._sampler.turns[name]
        while len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)
