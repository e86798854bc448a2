"""Simulated users: what each likes is known to nobody else, and what they say of it is noisy.

A reply has four traits. A user likes a reply more, the more traits are as this user wants them: the
length, whether a tool is used and the style by everyone's own leaning, the taste by the tenant. The
leanings drift over time.
"""

import math
import random

import msgspec
from tests.lab.simulate.users.settings import DAY_S, UsersScenario

LIKED_MAX = 0.95
"""Chance that a user likes a reply with all traits right."""
WRONG_FACTOR = 0.5
"""What each wrong trait leaves of it."""


class ReplyTraits(msgspec.Struct, frozen=True):
    """What a user sees of a reply."""

    is_long: bool
    uses_tool: bool
    is_chatty: bool
    taste: int
    """0 or 1: which of two equal ways it takes."""


ALL_TRAITS = [
    ReplyTraits(is_long, uses_tool, is_chatty, taste)
    for is_long in (False, True)
    for uses_tool in (False, True)
    for is_chatty in (False, True)
    for taste in (0, 1)
]


class Person(msgspec.Struct, kw_only=True):
    """One user, honest or not."""

    name: str
    tenant: str
    taste: int
    leaning: float
    """How strongly everyone's leanings are this user's, 0 to 1."""
    phase: float
    """Of the drift of this user's mood."""
    speaks_as: str = ""
    """Whose requests its own look like; default: its tenant's."""
    is_contrary: bool = False
    """Rates everything the opposite of what honest users like."""

    def likes(self, traits: ReplyTraits | None, now_s: float) -> float:
        """Return the chance that this user likes a reply; None is one that says nothing of it."""
        if traits is None:
            return 0.0
        # A mood of a week: the same reply is liked a little more or less.
        mood = 1.0 + 0.05 * math.sin(2 * math.pi * (now_s / (7 * DAY_S) + self.phase))
        chance = LIKED_MAX * mood
        for is_wrong in (traits.is_long, not traits.uses_tool, traits.is_chatty):
            if is_wrong:
                chance *= 1.0 - self.leaning * (1.0 - WRONG_FACTOR)
        if traits.taste != self.taste:
            chance *= WRONG_FACTOR
        return min(chance, 1.0)

    def rates(
        self, traits: ReplyTraits | None, now_s: float, noise: float, rng: random.Random
    ) -> bool:
        """Return whether this user accepts a reply."""
        if self.is_contrary:
            return traits is None or rng.random() >= self.likes(traits, now_s)
        is_liked = rng.random() < self.likes(traits, now_s)
        return is_liked != (rng.random() < noise)


def population(scenario: UsersScenario, rng: random.Random) -> list[Person]:
    """Return the honest users of all tenants."""
    return [
        Person(
            name=f"u{number}",
            tenant=tenant_name(index),
            taste=index % 2,
            leaning=rng.uniform(0.8, 1.0),
            phase=rng.random(),
        )
        for index in range(scenario.num_tenants)
        for number in range(scenario.users_per_tenant)
    ]


def tenant_name(index: int) -> str:
    """Return a tenant's name, one letter: the policy sees it in the prompt."""
    return chr(ord("A") + index)


def delay_s(scenario: UsersScenario, rng: random.Random) -> float:
    """Return after how long a user rates a reply."""
    drawn = rng.lognormvariate(math.log(scenario.delay_s_median), scenario.delay_sigma)
    return min(max(drawn, scenario.delay_s_min), scenario.delay_s_max)
