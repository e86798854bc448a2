"""Advantages of live samples: reward minus a baseline of the tenant's other samples. Pure.

Production has one response per prompt, so a baseline replaces the group (REINFORCE). It is the mean
reward of the sample's tenant over the batch's other samples and recent ones, shrunk toward the
mean over all tenants, which is shrunk toward the middle of the scale:

    whole_i  = (sum of all but i + MIDDLE) / (number of all but i + 1)
    tenant_i = (sum of the tenant's but i + k whole_i) / (number of the tenant's but i + k)

It never contains the sample's own reward, so it adds no bias, and it always exists, even for the
first batch and for single samples. It is a fold of manifests in Python's float64, in their order,
so that replay gets the same bits.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from penstock.actors.trainer.config import LiveConfig
from penstock.messages.training import SampleEntry

MIDDLE = 0.5
"""Middle of the scale of rewards, 0 to 1."""
NUM_TENANTS_MAX = 10_000
"""Maximum tenants remembered; the one trained longest ago is forgotten first."""


class _Sum(msgspec.Struct, kw_only=True):
    rewards: float = 0.0
    num_samples: float = 0.0

    def add(self, reward: float, keep: float) -> None:
        self.rewards = keep * self.rewards + reward
        self.num_samples = keep * self.num_samples + 1.0


class LiveBaseline:
    """Exponentially weighted rewards of trained live samples, by tenant and over all."""

    def __init__(self) -> None:
        self._whole = _Sum()
        self._tenants: OrderedDict[str, _Sum] = OrderedDict()

    def credit(self, samples: Sequence[SampleEntry], config: LiveConfig) -> list[SampleEntry]:
        """Return a batch's trained live samples with their advantages, before any cap."""
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
        """Add the trained live samples of a stored manifest, in order."""
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
    """Return the mean of all but one reward, with a prior that weighs as `num_prior` samples."""
    # Without the sample itself: a baseline that contains its own reward would be biased.
    num_others = total.num_samples - 1.0
    return (total.rewards - reward + num_prior * prior) / (num_others + num_prior)
