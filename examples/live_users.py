"""Users teach a running service what they like: `python -m examples.live_users`.

Gateway, feedback join, trainer and generator are the real ones, over a bus in memory. The policy
has some ten thousand parameters and sixteen replies to choose from. Users ask over HTTP, each likes
certain replies, and says so of three in ten. The clock is simulated: days pass in a minute.
"""

import asyncio
import random

from tests.lab.simulate.users.client import UserClient
from tests.lab.simulate.users.learning import new_store
from tests.lab.simulate.users.people import Person, population, tenant_name
from tests.lab.simulate.users.service import Service
from tests.lab.simulate.users.settings import HOUR_S, UsersScenario
from tests.lab.simulate.users.tiny_policy import TOPICS, TinyPolicy
from tests.lab.simulate.users.virtual_io import run_virtual_io

SPEAKS = 0.3
NOISE = 0.1


async def ask_and_rate(client: UserClient, person: Person, rng: random.Random) -> bool:
    """Make one request; return whether the user said what they think of the reply."""
    reply = await client.ask(person, rng.choice(TOPICS))
    if reply is None or rng.random() > SPEAKS:
        return False
    is_accepted = person.rates(reply.traits, asyncio.get_running_loop().time(), NOISE, rng)
    return await client.rate(person, reply, is_accepted=is_accepted) is not None


async def teach(num_days: int, seed: int = 0) -> tuple[float, float]:
    """Serve users for some days; return how likely a reply is accepted, before and after."""
    scenario, rng = UsersScenario(seed=seed), random.Random(seed)
    people = population(scenario, rng)
    policy = TinyPolicy([tenant_name(index) for index in range(scenario.num_tenants)])
    service = Service(scenario, policy, await new_store(policy, seed))

    def acceptance() -> float:
        weights = service.publisher.snapshots[service.version]
        return policy.acceptance(weights, people, asyncio.get_running_loop().time())

    async with service.running():
        client = UserClient(service.url, service.tokens)
        before, num_ratings = acceptance(), 0
        print(f"day 0: version {service.version}, {before:.0%} of replies would be accepted")
        for hour in range(1, 24 * num_days + 1):
            chosen = [rng.choice(people) for _ in range(scenario.requests_per_hour)]
            rated = await asyncio.gather(*(ask_and_rate(client, each, rng) for each in chosen))
            num_ratings += sum(rated)
            await asyncio.sleep(HOUR_S)
            if hour % 24 == 0:
                said = f"{acceptance():.0%} would be accepted, {num_ratings} ratings so far"
                print(f"day {hour // 24}: version {service.version}, {said}")
        await client.close()
        return before, acceptance()


def main() -> None:
    """Print acceptance day by day."""
    before, after = run_virtual_io(teach(num_days=6))
    print(f"acceptance: {before:.0%} before, {after:.0%} after")


if __name__ == "__main__":
    main()
