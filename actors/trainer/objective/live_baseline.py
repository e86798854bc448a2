"""Advantages of live samples: reward minus what the tenant's other samples got.

Production has one response per prompt, so a baseline takes the group's place (REINFORCE). It is the
mean reward of the sample's tenant over the other samples of the batch and the recent ones before
it, shrunk to the same mean over all tenants, and that to the middle of the scale:

    whole_i  = (sum of all but i + MIDDLE) / (number of all but i + 1)
    tenant_i = (sum of the tenant's but i + k whole_i) / (number of the tenant's but i + k)

It never contains the sample's own reward, so it biases nothing; and there always is one, so that
neither the first batch nor a sample alone is used up for nothing. A fold of manifests alone, in
Python's float64 in their order: replay gets the same bits. Pure.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from penstock.actors.trainer.config import LiveConfig
from penstock.messages.training import SampleEntry

MIDDLE = 0.5
"""Of the scale of rewards, 0 to 1."""
NUM_TENANTS_MAX = 10_000
"""Tenants whose recent rewards are kept; the one trained longest ago goes first."""


class _Sum(msgspec.Struct, kw_only=True):
    rewards: float = 0.0
    num_samples: float = 0.0

    def add(self, reward: float, keep: float) -> None:
        self.rewards = keep * self.rewards + reward
        self.num_samples = keep * self.num_samples + 1.0


class LiveBaseline:
    """Recent rewards of the live samples trained so far, by tenant and over all."""

    def __init__(self) -> None:
        """Start without history."""
        self._whole = _Sum()
        self._tenants: OrderedDict[str, _Sum] = OrderedDict()

    def credit(self, samples: Sequence[SampleEntry], config: LiveConfig) -> list[SampleEntry]:
        """Return one batch's trained live samples with their advantages, before any cap."""
        whole = self._with(self._whole, samples)
        by_tenant: dict[str, list[SampleEntry]] = {}
        for sample in samples:
            by_tenant.setdefault(sample.tenant, []).append(sample)
        tenants = {
            tenant: self._with(self._tenants.get(tenant, _Sum()), own)
            for tenant, own in by_tenant.items()
        }
        found: list[SampleEntry] = []
        for sample in samples:
            mean = _mean_without(whole, sample.reward, MIDDLE, 1.0)
            own = tenants[sample.tenant]
            baseline = _mean_without(own, sample.reward, mean, config.baseline_num_prior)
            found.append(msgspec.structs.replace(sample, advantage=sample.reward - baseline))
        return found

    def add(self, samples: Iterable[SampleEntry], config: LiveConfig) -> None:
        """Take in the trained live samples of a stored manifest, in order."""
        for sample in samples:
            self._whole.add(sample.reward, config.baseline_momentum)
            own = self._tenants.setdefault(sample.tenant, _Sum())
            own.add(sample.reward, config.baseline_momentum)
            self._tenants.move_to_end(sample.tenant)
        while len(self._tenants) > NUM_TENANTS_MAX:
            self._tenants.popitem(last=False)

    @staticmethod
    def _with(history: _Sum, samples: Sequence[SampleEntry]) -> _Sum:
        return _Sum(
            rewards=history.rewards + sum(sample.reward for sample in samples),
            num_samples=history.num_samples + len(samples),
        )


def _mean_without(total: _Sum, reward: float, prior: float, num_prior: float) -> float:
    """Return the mean of all but one reward, with a prior that counts as so many samples."""
    num_others = total.num_samples - 1.0
    return (total.rewards - reward + num_prior * prior) / (num_others + num_prior)
