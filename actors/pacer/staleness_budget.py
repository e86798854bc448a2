"""The staleness budget: how many groups may be granted now. A pure state machine.

```
 granted ──────────────▶ running + finished ──▶ trained (groups_per_batch a version)
    ▲                                      └──▶ discarded
    └── allowed = (staleness_max + version + 1) x groups_per_batch + discarded
```
The trainer takes groups in the order of their index. Group number n (from 0, without discarded
ones) trains version n // groups_per_batch. It is granted no earlier than at the version where
n < (staleness_max + version + 1) x groups_per_batch; so at most `staleness_max` versions pass
between its first token and its training.

Example (groups_per_batch 2, staleness_max 1): version 0 allows 4; a discarded group makes it 5;
version 1 makes it 7.
"""

import msgspec


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start of the run; each change gives a new budget."""

    groups_per_batch: int
    staleness_max: int
    steps_max: int
    policy_version: int = -1
    """Oldest version that may sample a rollout granted now; -1 if none exists."""
    num_granted: int = 0
    num_trained: int = 0
    num_discarded: int = 0
    batch_version: int = -1
    """Version at which the newest batch was computed."""
    num_discarded_with_batch: int = 0
    """Groups that the newest batch discarded."""
    is_closed: bool = False

    @property
    def num_allowed(self) -> int:
        """Upper bound of `num_granted` by staleness."""
        if self.policy_version < 0:
            return 0
        batches = self.staleness_max + self.policy_version + 1
        return batches * self.groups_per_batch + self._num_made_up_for

    @property
    def _num_made_up_for(self) -> int:
        # Without staleness, replacements for groups that the newest batch discarded wait for its
        # step: granted now, they would train one version later than they were sampled.
        if self.staleness_max > 0 or self.batch_version < self.policy_version:
            return self.num_discarded
        return self.num_discarded - self.num_discarded_with_batch

    @property
    def num_needed(self) -> int:
        """Groups that the whole run can use."""
        return self.steps_max * self.groups_per_batch + self.num_discarded

    @property
    def num_grantable(self) -> int:
        """Groups that may be granted now."""
        if self.is_closed:
            return 0
        return max(0, min(self.num_allowed, self.num_needed) - self.num_granted)

    def with_version(self, policy_version: int) -> "Budget":
        """Return the budget at a version; versions never go back."""
        newest = max(self.policy_version, policy_version)
        return msgspec.structs.replace(self, policy_version=newest)

    def with_batch(self, version: int, num_trained: int, num_discarded: int) -> "Budget":
        """Return the budget after one more batch manifest, computed at `version`."""
        return msgspec.structs.replace(
            self,
            num_trained=self.num_trained + num_trained,
            num_discarded=self.num_discarded + num_discarded,
            batch_version=version,
            num_discarded_with_batch=num_discarded,
        )

    def with_granted(self, num_groups: int) -> "Budget":
        """Return the budget after granting that many more groups."""
        assert num_groups <= self.num_grantable, f"{num_groups} > {self.num_grantable} grantable"
        return msgspec.structs.replace(self, num_granted=self.num_granted + num_groups)

    def resumed_at(self, num_granted: int) -> "Budget":
        """Return the budget with at least that many grants, after a restart."""
        return msgspec.structs.replace(self, num_granted=max(self.num_granted, num_granted))

    def closed(self) -> "Budget":
        """Return a budget that grants nothing more."""
        return msgspec.structs.replace(self, is_closed=True)

    def opened(self) -> "Budget":
        """Return a budget that grants again."""
        return msgspec.structs.replace(self, is_closed=False)
