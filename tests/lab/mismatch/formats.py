"""The formats of the experts against each other: loss and mismatch on one corpus, from one seed."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.actors.policy.checkpoint import load_published, publishable_state
from penstock.actors.policy.config import EXPERT_FORMATS, NumericsConfig, PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.config import MidtrainConfig, OptimizerConfig
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.midtraining.corpus import Corpus, MidtrainCorpora
from penstock.actors.trainer.midtraining.midtrain import Midtrainer
from penstock.infra.mismatch.figures import measure
from penstock.infra.mismatch.rollouts import sample_rollouts
from penstock.infra.mismatch.trainers import TrainerForward

_NUM_POINTS = 10


def compare_formats(
    policy_config: PolicyConfig,
    config: MidtrainConfig,
    train: Corpus,
    heldout: Corpus,
    *,
    num_tokens: int,
    prompts: Sequence[np.ndarray],
    num_sampled: int = 2000,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Mid-train the same weights on the same batches in each format, then sample from them.

    Args:
        policy_config: whose shape.
        config: of mid-training, but for its budget.
        train: corpus.
        heldout: corpus.
        num_tokens: budget of each format.
        prompts: to sample from afterwards.
        num_sampled: tokens, at least.
        seed: of weights and batches.

    Yields:
        For each format, once it is done, its `losses` over the budget (means of tenths),
        `heldout_loss`, `tokens_per_s`, the `mismatch` of its trainer in fast mode, and by other
        format `unmatched`: what a trainer in that one would learn from, were it not refused.

    """
    settings = msgspec.structs.replace(config, num_tokens=num_tokens, seconds=0.0, num_workers=1)
    for expert_format in EXPERT_FORMATS:
        numerics = NumericsConfig(expert_format=expert_format)
        policy = Policy(msgspec.structs.replace(policy_config, numerics=numerics), seed=seed)
        midtrainer = Midtrainer(
            Learner(policy, OptimizerConfig()), settings, MidtrainCorpora(train, heldout), seed
        )
        started = time.perf_counter()
        while midtrainer.spent(0.0) < 1.0:
            midtrainer.run(0.0)
        elapsed_s = time.perf_counter() - started
        tenths = np.array_split(np.array(midtrainer.losses), _NUM_POINTS)
        row = {
            "expert_format": expert_format,
            "losses": [float(tenth.mean()) for tenth in tenths if tenth.size],
            "heldout_loss": midtrainer.heldout_loss(),
            "tokens_per_s": midtrainer.num_tokens / elapsed_s,
        }
        yield row | _sample(policy, prompts, num_sampled)


def _sample(policy: Policy, prompts: Sequence[np.ndarray], num_tokens: int) -> dict[str, Any]:
    """Sample from a policy; measure the trainer of its own format and those of the others."""
    load_published(policy, publishable_state(policy))
    rollouts = sample_rollouts(policy, policy, prompts, num_tokens, 1.0)
    own = policy.config.numerics.expert_format
    found = {
        other: msgspec.to_builtins(measure(_trainer(policy, other), rollouts, 1))
        for other in EXPERT_FORMATS
    }
    return {"mismatch": found.pop(own), "unmatched": found}


def _trainer(policy: Policy, expert_format: str) -> TrainerForward:
    """Return a trainer in fast mode whose experts compute in a format, not always the sampler's."""
    numerics = NumericsConfig(expert_format=expert_format)
    other = Policy(msgspec.structs.replace(policy.config, numerics=numerics))
    other.load_state_dict(policy.state_dict())
    return SequenceForward(other).run


def format_line(row: dict[str, Any]) -> str:
    """Return a line about one format of the experts."""
    losses = " ".join(f"{loss:.2f}" for loss in row["losses"])
    refused = ", ".join(f"{name} {found['kl_k3']:.1e}" for name, found in row["unmatched"].items())
    return (
        f"{row['expert_format']} experts: losses {losses}, held out {row['heldout_loss']:.4f}, "
        f"{row['tokens_per_s']:.0f} tokens/s; k3 {row['mismatch']['kl_k3']:.1e}, and of trainers "
        f"that are refused: {refused}"
    )
