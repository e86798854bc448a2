"""Part `learning`: how many of the users' ratings reach the policy, and what it learns of them.

Virtual days of requests; seven of ten users are silent, others rate their reply after ten seconds
to three days, and one rating in ten is wrong. Counted is what became of each rating.
"""

import asyncio
import random
import sys
from typing import Any

from tests.lab.simulate.users.client import UserClient
from tests.lab.simulate.users.people import Person, delay_s, population, tenant_name
from tests.lab.simulate.users.service import Service
from tests.lab.simulate.users.settings import HOUR_S, UsersScenario
from tests.lab.simulate.users.tiny_policy import TOPICS, TinyPolicy
from tests.lab.simulate.users.virtual_io import run_virtual_io

from penstock.infra.stores.memory import MemoryStore
from penstock.messages.feedback import FeedbackReceived, LiveSampleJoined

NUM_DOCUMENTS = 3000


def simulate_learning(scenario: UsersScenario) -> dict[str, Any]:
    """Run the part; return its figures."""
    return run_virtual_io(_learn(scenario))


async def _learn(scenario: UsersScenario) -> dict[str, Any]:
    rng = random.Random(scenario.seed)
    people = population(scenario, rng)
    policy = TinyPolicy([tenant_name(index) for index in range(scenario.num_tenants)])
    service = Service(scenario, policy, await new_store(policy, scenario.seed))
    async with service.running():
        client = UserClient(service.url, service.tokens)
        week = _Days(scenario, service, client, people, rng)
        try:
            await week.run()
        finally:
            await client.close()
        return week.figures()


async def new_store(policy: TinyPolicy, seed: int) -> MemoryStore:
    """Return a store with what a new policy is mid-trained on."""
    store, rng = MemoryStore(), random.Random(seed)
    await store.put("midtrain/tokens", policy.corpus(rng, NUM_DOCUMENTS))
    await store.put("midtrain/heldout", policy.corpus(rng, NUM_DOCUMENTS // 20))
    return store


class _Days:
    """The requests and ratings of all days."""

    def __init__(
        self,
        scenario: UsersScenario,
        service: Service,
        client: UserClient,
        people: list[Person],
        rng: random.Random,
    ) -> None:
        self._scenario, self._service, self._client = scenario, service, client
        self._people, self._rng = people, rng
        self._rated: set[str] = set()
        """Requests whose feedback the gateway took; ids of feedback are pseudonyms on the log."""
        self._curve: list[tuple[int, float]] = []

    async def run(self) -> None:
        """Let all days pass, and then those on which the last ratings come."""
        scenario = self._scenario
        async with asyncio.TaskGroup() as ratings:
            for hour in range(scenario.num_days * 24):
                requests = [
                    self._request(ratings, self._rng.choice(self._people))
                    for _ in range(scenario.requests_per_hour)
                ]
                await asyncio.gather(*requests)
                self._note(hour)
                await asyncio.sleep(HOUR_S)
        await asyncio.sleep(2 * scenario.epoch_s + 2 * HOUR_S)
        self._note(scenario.num_days * 24)

    async def _request(self, ratings: asyncio.TaskGroup, person: Person) -> None:
        scenario, rng = self._scenario, self._rng
        reply = await self._client.ask(person, rng.choice(TOPICS))
        if reply is None or rng.random() < scenario.silent_share:
            return
        is_accepted = person.rates(reply.traits, self._now_s(), scenario.noise, rng)
        wait_s = delay_s(scenario, rng)

        async def rate() -> None:
            await asyncio.sleep(wait_s)
            feedback_id = await self._client.rate(person, reply, is_accepted=is_accepted)
            if feedback_id is not None:
                self._rated.add(reply.request_id)

        ratings.create_task(rate())

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _acceptance(self, version: int) -> float:
        snapshot = self._service.publisher.snapshots[version]
        return self._service.policy.acceptance(snapshot, self._people, self._now_s())

    def _note(self, hour: int) -> None:
        if hour % 24:
            return
        self._curve.append((self._service.version, self._acceptance(self._service.version)))
        sys.stderr.write(
            f"day {hour // 24}: version {self._curve[-1][0]}, "
            f"acceptance {self._curve[-1][1]:.3f}, {len(self._rated)} ratings\n"
        )

    def figures(self) -> dict[str, Any]:
        """Return what became of the ratings, and what the policy learned."""
        joined: dict[str, LiveSampleJoined] = {}
        for event in self._service.events(LiveSampleJoined):
            assert isinstance(event, LiveSampleJoined)
            joined[event.key()] = event
        request_of = {
            event.key(): event.request_id
            for event in self._service.events(FeedbackReceived)
            if isinstance(event, FeedbackReceived)
        }
        trained: set[str] = set()
        outcomes: dict[str, int] = {}
        for manifest in self._service.manifests():
            for sample in manifest.live:
                outcomes[sample.outcome] = outcomes.get(sample.outcome, 0) + 1
                event = joined.get(f"{sample.rollout_id}.{sample.revision}")
                if sample.outcome.is_trained and event is not None:
                    trained |= {request_of[key] for key in event.feedback_ids}
        snapshots, last = self._service.publisher.snapshots, self._service.version
        wanted = self._service.policy.wanted_traits
        return {
            "trained_share": round(len(trained & self._rated) / max(len(self._rated), 1), 4),
            "num_rated": len(self._rated),
            "num_requests": self._client.num_requests,
            "num_versions": last,
            "outcomes": outcomes,
            "acceptance_before": round(self._acceptance(0), 4),
            "acceptance_after": round(self._acceptance(last), 4),
            "wanted_before": wanted(snapshots[0]),
            "wanted_after": wanted(snapshots[last]),
            "acceptance_by_day": [(version, round(value, 4)) for version, value in self._curve],
            "failed_requests": self._client.num_failed,
        }
