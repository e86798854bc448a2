"""Check of verdicts during replay: each reward is recomputed from what its verdict records."""

import math
from collections.abc import AsyncIterator

import msgspec

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.reward import recompose
from penstock.messages.bus import Bus, Delivery
from penstock.messages.control import RunStarted
from penstock.messages.errors import ConfigError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.reward import Outcome, Verdict

TOLERANCE = 1e-6


async def recorded_judge(bus: Bus, own: JudgeConfig) -> JudgeConfig:
    """Return the judge settings that composed the rewards of a run, as its log records them.

    The configuration of an imported run lacks them, because it keeps nothing that names a server.

    Args:
        own: Judge settings of the configuration, used if the log has none.

    Raises:
        CodecError: The recorded configuration is not TOML.
        ConfigError: The recorded judge settings are wrong.

    """
    started = await bus.last(RunStarted)
    if started is None or not isinstance(started.event, RunStarted):
        return own
    where = "RunStarted.config_toml"
    table = parse_toml(started.event.config_toml, where).get("judge", {})
    try:
        return msgspec.convert(table, JudgeConfig)
    except ValueError as error:
        raise ConfigError(f"{where}: judge: {error}") from error


class VerdictCheck:
    """Comparison of the verdicts in a log with rewards recomputed from the judge settings."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self.num_checked = self.num_different = 0
        self.first_difference = ""

    async def along(self, deliveries: AsyncIterator[Delivery]) -> AsyncIterator[Delivery]:
        """Yield all events unchanged, and check the verdicts among them."""
        async for delivery in deliveries:
            if isinstance(event := delivery.event, Verdict):
                self.add(event)
            yield delivery

    def add(self, verdict: Verdict) -> None:
        """Recompute the reward of one verdict and count a difference."""
        # Older logs record no lengths, without which a solved reward cannot be recomputed.
        is_older = verdict.outcome is Outcome.SOLVED and verdict.lengths is None
        if is_older or verdict.judge != self._config.judge:
            return
        self.num_checked += 1
        expected, found = recompose(verdict, self._config), verdict.components
        is_equal = set(expected) == set(found) and all(
            math.isclose(expected[name], found[name], rel_tol=0.0, abs_tol=TOLERANCE)
            for name in expected
        )
        if not is_equal:
            self.num_different += 1
            text = f"verdict of {verdict.rollout_id}: {found}, composed again {expected}"
            self.first_difference = self.first_difference or text
