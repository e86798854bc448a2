"""Draws tokens inside vLLM's worker, in place of its sampler.

A token is a function of its logits, its settings and its place in the turn alone: a request that
vLLM preempts, freezes or prefills in parts draws the same numbers as one that it does not. What is
neither token nor log-probability travels as pairs (id, log-probability) beside the sampled one,
which vLLM passes on as its own likeliest tokens: first V + policy version, then the top tokens.
"""

from typing import Any

import msgspec
import numpy as np
import torch

from penstock.actors.generator.engine import InvalidRequestError
from penstock.actors.generator.masks import GrammarMasks
from penstock.actors.generator.sampler import SamplingBatch, finite_rows, sample, uniforms_for
from penstock.actors.generator.shaper import Shaped, TurnShaper, top_tokens
from penstock.actors.generator.vllm.library import of_vllm
from penstock.actors.generator.vllm.turns import EXTRA, TurnRecord, TurnSettings
from penstock.messages.task import Sampling

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
