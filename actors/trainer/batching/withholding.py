"""What is too old to be trained, and what of a late group is all the same. Pure.

With `trainer.staleness_policy = "withhold"` no step waits for a straggler, and no group is left out
for one: a group is trained when all of its rollouts have their verdicts, whenever that is. What is
too old by then is context alone; what the same rollouts sampled later is trained, against a
baseline of all rewards.

```
 staleness_max 2, trained at version 6       version   2    3    4    5    6     reward
   its first rollout, done at version 3                ------                    counts, WITHHELD
   its last one, done at version 6                          ------ +++++++++     counts, trained
                                                          trained from 4 on
```
No rollout ends after its group was trained: the group waits for all of them, the steps do not.
Source: whole rollouts are withheld by prime-rl (pull request 2960); here what is fresh of one is
kept, so that the rollouts of slow tasks, old at their beginning, are trained all the same.
"""

from collections.abc import Sequence

import msgspec

from penstock.actors.trainer.config import TrainerConfig
from penstock.messages.reward import Outcome
from penstock.messages.rollout import VersionSpan
from penstock.messages.training import SampleEntry


def fate_of_age(
    spans: Sequence[VersionSpan], policy_version: int, config: TrainerConfig
) -> Outcome | None:
    """Return as what a complete group is left out of a step for its age, or None.

    Args:
        spans: Tokens of all its rollouts that may be trained; some.
        policy_version: That the step trains.
        config: Of the step.

    """
    versions = [span.policy_version for span in spans]
    oldest_allowed = policy_version - config.staleness_max
    if config.staleness_policy == "withhold":
        return Outcome.WITHHELD if max(versions) < oldest_allowed else None
    return Outcome.STALE if min(versions) < oldest_allowed else None


def first_trained(sample: SampleEntry, policy_version: int, config: TrainerConfig) -> int | None:
    """Return from which version on a sample's tokens are trained; None: they are all withheld.

    Returns:
        0 where nothing is withheld.

    """
    if config.staleness_policy != "withhold" or not sample.version_spans:
        return 0
    oldest_allowed = policy_version - config.staleness_max
    versions = [span.policy_version for span in sample.version_spans]
    if min(versions) >= oldest_allowed:
        return 0
    return oldest_allowed if max(versions) >= oldest_allowed else None


def without_old_tokens(
    sample: SampleEntry, policy_version: int, config: TrainerConfig
) -> SampleEntry:
    """Return a sample's entry without the tokens that are too old to be trained, if it is."""
    if not sample.outcome.is_trained:
        return sample
    first = first_trained(sample, policy_version, config)
    if first is None:
        return msgspec.structs.replace(sample, outcome=Outcome.WITHHELD, advantage=0.0, trunk=None)
    return msgspec.structs.replace(sample, trained_from=first)
