"""Users with a hidden goal, the real join, batcher and steps, on virtual time; no log between."""

import heapq
import itertools

import msgspec
import numpy as np
import torch
from tests.sealed import sealed_turn

from penstock.actors.feedback.config import JoinConfig
from penstock.actors.feedback.join import FeedbackJoin
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.batching.batcher import Batcher
from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.actors.trainer.config import EpochConfig, LossConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.off_policy import is_older, measure, recorded
from penstock.actors.trainer.step import train_step
from penstock.kernels.arrays import to_array
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.reward import Outcome
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.signals.declaration import SignalKind, SignalLevel, SignalSpec
from penstock.messages.task import Sampling
from penstock.messages.training import BatchManifest

NUM_TURNS = 6
GOAL = 16
"""What the users want: a token below this in every turn but the last, which only closes."""
POLICY = PolicyConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=0,
    num_experts_per_tok=0,
    intermediate_size=32,
    max_position_embeddings=64,
)


class LiveLoop:
    """One tenant with eight users; each session is rated once, at its last message."""

    def __init__(self, level: SignalLevel, *, num_samples: int = 16, rate: float = 1e-2) -> None:
        torch.set_num_threads(1)
        signal = SignalSpec(name="goal", kind=SignalKind.FRACTION, level=level)
        self.config = TrainerConfig(
            epoch=EpochConfig(num_samples=num_samples, s_max=3600.0),
            optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=1),
            loss=LossConfig(token_denominator=float(NUM_TURNS)),
        )
        self.join = FeedbackJoin(JoinConfig(signals=(signal,)))
        self.batcher = Batcher(self.config)
        self.learner = Learner.initialized(POLICY, self.config.optimizer, seed=1)
        self.turns: dict[str, Turn] = {}
        self.samples: dict[str, LiveSampleJoined] = {}
        self.manifests: list[BatchManifest] = []
        self.metrics: list[dict[str, float]] = []
        self.random = np.random.default_rng(5)
        self.now = 0.0
        self.version = 0
        self.given: list[str] = []
        self._later: list[tuple[float, int, FeedbackReceived]] = []
        self._count = itertools.count()

    def sessions(self, count: int, delay_s: float | None) -> float:
        """Have sessions, each rated after a time (log-normal if None); return the mean reward."""
        contexts = [[63] for _ in range(count)]
        hits = np.zeros(count)
        names = [f"s{next(self._count)}" for _ in range(count)]
        for place in range(NUM_TURNS):
            tokens, logprobs = self._draw(contexts)
            for i, token in enumerate(tokens):
                self._record(names[i], place, contexts[i], int(token), float(logprobs[i]))
                contexts[i] = [*contexts[i], int(token), 48 + place]
                hits[i] += place < NUM_TURNS - 1 and token < GOAL
        rewards = hits / (NUM_TURNS - 1)
        for name, reward in zip(names, rewards, strict=True):
            wait = np.exp(self.random.normal(8.0, 2.0)) if delay_s is None else delay_s
            self._rate(name, float(reward), self.now + float(np.clip(wait, 10.0, 259_200.0)))
        return float(rewards.mean())

    def advance(self, seconds: float) -> None:
        """Let time pass; feedback comes, is joined, and trains."""
        self.now += seconds
        while self._later and self._later[0][0] <= self.now:
            at, _, event = heapq.heappop(self._later)
            self.join.add_feedback(event, at)
        for event in list(self.join.due(self.now + 10.0)):
            self.join.note_joined(event, self.now + 10.0)
            self.samples[event.sample_id] = event
            self.batcher.add_live(event)
        while self._step():
            pass

    def _step(self) -> bool:
        measured = {}
        while True:
            manifest = self.batcher.propose(self.version + 1, is_due=True)
            if manifest is None or not trained_samples(manifest):
                return False
            turns = {
                entry.rollout_id: [
                    self.turns[name] for name in self.samples[entry.rollout_id].request_ids
                ]
                for entry in manifest.live
            }
            older = [s for s in trained_samples(manifest) if is_older(s, self.version)]
            new = [sample for sample in older if sample.rollout_id not in measured]
            measured |= measure(self.learner, new, turns, self.config)
            stale = [s for s in older if measured[s.rollout_id].is_stale(self.config.live)]
            if not stale:
                break
            self.batcher.leave_out({sample.rollout_id: Outcome.STALE for sample in stale})
        manifest = recorded(manifest, measured)
        self.batcher.commit(manifest)
        self.metrics.append(train_step(self.learner, manifest, turns, self.config).metrics)
        self.manifests.append(manifest)
        self.version += 1
        return True

    @torch.no_grad()
    def _draw(self, contexts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        lengths = [len(context) for context in contexts]
        ids = torch.tensor([token for context in contexts for token in context])
        with self.learner.published_weights():
            output = self.learner.policy(ids, lengths)
            last = torch.tensor(lengths).cumsum(0) - 1
            logits = self.learner.policy.logits(output.hidden.index_select(0, last))
        logprobs = torch.log_softmax(logits.float(), dim=-1).numpy()
        noise = self.random.gumbel(size=logprobs.shape)
        tokens = np.argmax(logprobs + noise, axis=1)
        return tokens, logprobs[np.arange(len(tokens)), tokens]

    def _record(
        self, session: str, place: int, context: list[int], token: int, logprob: float
    ) -> None:
        name = f"{session}-{place}"
        self.turns[name] = Turn(
            context_ids=to_array(np.array(context, np.int32)),
            token_ids=to_array(np.array([token], np.int32)),
            behavior_logprobs=to_array(np.array([logprob], np.float32)),
            version_spans=[VersionSpan(policy_version=self.version, num_tokens=1)],
            stop_reason=StopReason.STOP,
            sampling=Sampling(),
        )
        record = InferenceRecorded(
            request_id=name,
            session_id=session,
            key_id="k",
            tenant="t",
            user=f"u{hash_of(session) % 8}",
            training_consent=True,
            variant="v",
            propensity=1.0,
            recorded_at=self.now,
            turn=sealed_turn(self.turns[name], name),
            policy_version=self.version,
            replica="west",
        )
        self.join.add_record(record, self.now)

    def _rate(self, session: str, reward: float, at: float) -> None:
        event = FeedbackReceived(
            feedback_id=f"f-{session}",
            request_id=f"{session}-{NUM_TURNS - 1}",
            name="goal",
            value=reward,
            key_id="k",
            tenant="t",
        )
        self.given.append(event.feedback_id)
        heapq.heappush(self._later, (at, next(self._count), event))

    @property
    def trained_share(self) -> float:
        """Share of the feedback given that a step has trained."""
        trained = {entry.rollout_id for m in self.manifests for entry in trained_samples(m)}
        roots = {root for name in trained for root in self.samples[name].feedback_ids}
        return len(roots & {f"t.{name}" for name in self.given}) / len(self.given)


def hash_of(name: str) -> int:
    """Return the same number in every process."""
    return int.from_bytes(msgspec.msgpack.encode(name)[-2:], "big")
