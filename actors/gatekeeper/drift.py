"""How far the candidate's weights are from the stable version, on what stable sampled. Pure.

The trainer computes, for each step, the logprobs of users' tokens under the version that it trains
from, beside those of the version that sampled them (`StepCompleted.drift`): that of the step after
the candidate is the candidate against stable.
"""

from collections import OrderedDict

from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.messages.gates import Gate, GateState
from penstock.messages.training import StepCompleted, VersionDrift

NUM_STEPS_MAX = 4096
"""Steps whose figures are kept."""


class DriftGates:
    """The guards `kl` and `ess`."""

    def __init__(self, config: GatekeeperConfig) -> None:
        self._config = config
        self._steps: OrderedDict[int, dict[int, VersionDrift]] = OrderedDict()
        """Version trained from -> version that sampled -> figures."""

    def add(self, event: StepCompleted) -> None:
        """Take a step's figures."""
        if event.drift:
            self._steps[event.step - 1] = event.drift
            if len(self._steps) > NUM_STEPS_MAX:
                self._steps.popitem(last=False)

    def gates(self, candidate: int, stable: int) -> list[Gate]:
        """Return both guards, over the first steps from the candidate on that read enough.

        Later steps train from versions that are further away, so they are no excuse.
        """
        needed = max(self._config.guard(name).num_min for name in ("kl", "ess"))
        num, kl, ess = 0, 0.0, 0.0
        for version, of in self._steps.items():
            if version >= candidate and (one := of.get(stable)) is not None and num < needed:
                num += one.num_tokens
                kl += one.kl * one.num_tokens
                ess += one.ess * one.num_tokens
        return [
            self._gate("kl", kl / max(1, num), 0.0, num, is_bad_above=True),
            self._gate("ess", ess / num if num else 1.0, 1.0, num, is_bad_above=False),
        ]

    def _gate(
        self, name: str, value: float, baseline: float, num_tokens: int, *, is_bad_above: bool
    ) -> Gate:
        settings = self._config.guard(name)
        is_bad = value > settings.bound if is_bad_above else value < settings.bound
        words = f"{value:.3g}, bound {settings.bound:g}"
        state = GateState.FAILED if is_bad else GateState.PASSED
        if num_tokens < settings.num_min:
            state = GateState.WAITING
            words = f"{words}; {num_tokens} of {settings.num_min} tokens of stable were trained"
        return Gate(
            name=name,
            state=state,
            words=words,
            value=value,
            baseline=baseline,
            bound=settings.bound,
            num_candidate=num_tokens,
        )
