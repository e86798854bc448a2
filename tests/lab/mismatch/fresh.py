"""Fresh weights and random prompts: what `mismatch --config` measures instead of a run."""

from pathlib import Path

import numpy as np
import torch

from penstock.actors.policy.checkpoint import load_published, publishable_state
from penstock.actors.policy.model import Policy
from penstock.infra.config.file import load_config
from penstock.infra.mismatch.subject import MismatchSubject

_NUM_PROMPTS = 64
_PROMPT_TOKENS = 120
_SHARPNESS = 3.0
"""Fresh weights are near uniform: this makes routers and heads decide, as trained ones do."""


def fresh_subject(path: Path) -> MismatchSubject:
    """Return two fresh, sharpened policies of a configuration, and random prompts."""
    config = load_config(path)
    seed = config.run.seed
    old, new = (_sharpened(Policy(config.policy, seed=seed + k)) for k in range(2))
    rng = np.random.default_rng(seed)
    prompts = [
        rng.integers(0, config.policy.vocab_size, _PROMPT_TOKENS - index % 40)
        for index in range(_NUM_PROMPTS)
    ]
    return MismatchSubject(
        source=str(path),
        old=old,
        new=new,
        prompts=prompts,
        temperature=config.pacer.temperature,
    )


def _sharpened(policy: Policy) -> Policy:
    """Sharpen a policy, then round it to what generators are given."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_SHARPNESS)
    load_published(policy, publishable_state(policy))
    return policy
