"""Rollouts for measuring mismatch: real sampling with everything that changes a batch.

Groups share prefixes, prompts are prefilled in odd chunks, sessions return for a second turn, the
batch fills and empties, and in the middle the weights are swapped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.actors.generator.core import EngineCore, GenerationRequest, Output
from penstock.actors.generator.engine import TokenChunk
from penstock.actors.generator.options import EngineOptions
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.distribution import TurnDraw
from penstock.actors.trainer.sequences import TrainingSequence
from penstock.messages.task import Sampling

_GROUP = 4
"""Requests that share a prompt."""
_NUM_RUNNING = 24
_PREFILL_TOKENS = 93
"""Odd on purpose, so that prompts are split anywhere."""
_TURN_TOKENS = 48
_OBSERVATION_TOKENS = 17


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Sampled sequences for the trainer, with the versions that sampled them."""

    sequences: list[TrainingSequence]
    versions: list[np.ndarray]
    """Policy version of each sampled token, [N] per sequence."""
    num_cached: int
    """Prompt tokens from the prefix cache."""
    route_cache_bytes: int
    """Memory for the routes of all cached tokens."""


class Sampler:
    """Drives one engine core, step by step."""

    def __init__(self, policy: Policy, temperature: float) -> None:
        longest = policy.config.max_position_embeddings
        options = EngineOptions(
            num_tokens_max=longest,
            num_running_max=_NUM_RUNNING,
            num_parked_max=4 * _NUM_RUNNING,
            prefill_tokens_max=_PREFILL_TOKENS,
        )
        self.core = EngineCore(policy.config, options)
        self._temperature = temperature
        self._chunks: dict[str, list[TokenChunk]] = {}
        self._requests: dict[str, GenerationRequest] = {}

    def use(self, policy: Policy, policy_version: int) -> None:
        """Swap in the weights of a policy between two steps."""
        self._take(self.core.swap_model(self.core.decoder.prepare(policy), policy_version))

    def ask(self, name: str, token_ids: np.ndarray, num_tokens: int) -> None:
        """Queue a request of the session `name`."""
        seed = len(self._requests)
        sampling = Sampling(temperature=self._temperature, num_tokens_max=num_tokens, seed=seed)
        request = GenerationRequest(token_ids, sampling, f"{name}.{seed}", name, 0)
        self._requests[name], self._chunks[name] = request, []
        self.core.add(request)

    def run(self, num_steps: int = 1_000_000) -> None:
        """Run `num_steps` steps, or until nothing is left."""
        for _ in range(num_steps):
            if not (self.core.waiting or self.core.num_running):
                return
            self._take(self.core.step())

    def tokens(self, name: str) -> np.ndarray:
        """Return the prompt and the sampled tokens after it."""
        sampled = [chunk.token_ids for chunk in self._chunks[name]]
        prompt = self._requests[name].prompt[: self._requests[name].num_prompt_tokens]
        return np.concatenate([prompt, *sampled])

    def sequence(self, name: str) -> tuple[TrainingSequence, np.ndarray]:
        """Return the last turn of a finished request for training, and its tokens' versions."""
        chunks, token_ids = self._chunks[name], self.tokens(name)
        versions = np.concatenate([np.full(len(c.token_ids), c.policy_version) for c in chunks])
        routes = chunks[-1].routed_experts
        assert routes is not None, "the request has ended"
        start, sampling = len(token_ids) - len(versions), self._requests[name].sampling
        sequence = TrainingSequence(
            rollout_id=name,
            num_inputs=len(token_ids) - 1,
            token_ids=token_ids.astype(np.int64),
            sampled_at=np.arange(start, len(token_ids)),
            draws=(TurnDraw(sampling=sampling, start=start, at=np.arange(len(versions))),),
            is_trained=np.ones(len(versions), bool),
            versions=versions,
            behavior_logprobs=np.concatenate([chunk.behavior_logprobs for chunk in chunks]),
            routed_experts=routes,
            advantages=np.zeros(len(versions), np.float32),
        )
        return sequence, versions

    def _take(self, outputs: Sequence[Output]) -> None:
        for request, chunk in outputs:
            self._chunks[request.session_id].append(chunk)


def sample_rollouts(
    old: Policy, new: Policy, prompts: Sequence[np.ndarray], num_tokens: int, temperature: float
) -> Rollouts:
    """Sample at least `num_tokens` with `new`, after some with `old`.

    Args:
        old: Policy of version 0, in use first.
        new: Policy of version 1, swapped in with requests in flight.
        prompts: Token ids; each starts `_GROUP` requests, round-robin.
        num_tokens: Approximate number of tokens sampled from version 1.

    """
    sampler = Sampler(new, temperature)
    sampler.use(old, 0)
    count = -(-num_tokens // (2 * _TURN_TOKENS)) + _NUM_RUNNING
    # Room for two turns and the observation between them.
    room = new.config.max_position_embeddings - 2 * _TURN_TOKENS - _OBSERVATION_TOKENS - 1
    names = [f"r{index}" for index in range(count)]
    # All queued at once: the batch fills up to `_NUM_RUNNING` and drains at the end.
    for index, name in enumerate(names):
        sampler.ask(name, prompts[index // _GROUP % len(prompts)][:room], _TURN_TOKENS)
    # Half a turn, so that the swap happens with requests in flight.
    sampler.run(_TURN_TOKENS // 2)
    sampler.use(new, 1)
    sampler.run()
    rng = np.random.default_rng(0)
    pairs: list[tuple[TrainingSequence, np.ndarray]] = []
    for name in names:
        pairs.append(sampler.sequence(name))
        observation = rng.integers(0, new.config.vocab_size, _OBSERVATION_TOKENS)
        sampler.ask(name, np.concatenate([sampler.tokens(name), observation]), _TURN_TOKENS)
    sampler.run()
    pairs += [sampler.sequence(name) for name in names]
    return Rollouts(
        sequences=[sequence for sequence, _ in pairs],
        versions=[versions for _, versions in pairs],
        num_cached=sampler.core.metrics.num_cached_tokens,
        route_cache_bytes=sampler.core.cache.routes.nbytes,
    )
