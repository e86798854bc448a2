"""Part `attack`: how far hostile users move what honest users get.

Every seed runs once with honest users alone and once with each kind of hostile ones, who like what
the others dislike and ask what the others ask:

    one key with five times the feedback of all honest users together
    1% and 5% of the users of honest tenants

The shift is the honest users' acceptance without them minus that with them, in points, computed
from the policy's probabilities on fixed prompts over the last half of the versions. Arms of a seed
have their random numbers in common: who asks what, by which seed it is sampled, and how the noise
of a rating falls (common random numbers), so that what differs between them is the attack.
"""

import asyncio
import copy
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import msgspec
from tests.lab.simulate.users.client import UserClient
from tests.lab.simulate.users.learning import new_store
from tests.lab.simulate.users.people import Person, population, tenant_name
from tests.lab.simulate.users.results import Results
from tests.lab.simulate.users.service import TICK_S, Service
from tests.lab.simulate.users.settings import UsersScenario
from tests.lab.simulate.users.tiny_policy import TOPICS, TinyPolicy
from tests.lab.simulate.users.virtual_io import run_virtual_io

from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import PenstockError
from penstock.messages.reward import Outcome

ARMS = ("honest", "flood", "sybils_1", "sybils_5")
T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110,
    18: 2.101, 19: 2.093,
}  # fmt: skip
"""Student's t for a two-sided interval of 95%, by degrees of freedom."""
NUM_PROCESSES = 2
ATTACKER = "z"


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    acceptance_before: float
    acceptance: float
    """Mean over the last half of the versions."""
    num_versions: int
    hostile_share: float
    """Of the trained samples."""
    hostile_pull: float
    """Of the sum of |advantage|."""
    num_capped: int
    num_refused: int
    num_failed: int


def simulate_attack(scenario: UsersScenario, results: Results) -> dict[str, Any]:
    """Run all arms over all seeds, but those that `results` has; return the figures.

    Raises:
        ConfigError: The results are another scenario's.

    """
    store = run_virtual_io(_trained_store(scenario))
    found: dict[str, dict[int, ArmResult]] = {arm: {} for arm in ARMS}
    jobs: list[tuple[int, str]] = []
    for seed in range(scenario.num_attack_seeds):
        for arm in ARMS:
            done = results.read(_name(seed, arm), ArmResult)
            if done is not None:
                found[arm][seed] = done
            else:
                jobs.append((seed, arm))
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        runs = {pool.submit(run_arm, scenario, copy.deepcopy(store), *job): job for job in jobs}
        for run in as_completed(runs):
            seed, arm = runs[run]
            result = found[arm][seed] = run.result()
            results.write(_name(seed, arm), result)
            sys.stderr.write(
                f"seed {seed}, {arm}: acceptance {result.acceptance_before:.3f} -> "
                f"{result.acceptance:.3f}, hostile {result.hostile_share:.1%} of samples\n"
            )
    return figures({arm: [runs[seed] for seed in sorted(runs)] for arm, runs in found.items()})


def _name(seed: int, arm: str) -> str:
    return f"attack-{arm}-{seed}"


def figures(found: dict[str, list[ArmResult]]) -> dict[str, Any]:
    """Return the shifts with their intervals, and what became of hostile feedback."""
    shifts = {
        arm: shift_of(
            [run.acceptance for run in found["honest"]], [run.acceptance for run in found[arm]]
        )
        for arm in ARMS[1:]
    }
    return {
        "attacker_shift": shifts["flood"]["points"],
        "attacker_shift_interval": shifts["flood"]["interval"],
        "shifts": shifts,
        "arms": {arm: [msgspec.to_builtins(run) for run in runs] for arm, runs in found.items()},
        "failed_requests": sum(run.num_failed for runs in found.values() for run in runs),
    }


def shift_of(honest: list[float], attacked: list[float]) -> dict[str, Any]:
    """Return the mean loss of acceptance in points, and its 95% interval over paired seeds."""
    losses = [100 * (a - b) for a, b in zip(honest, attacked, strict=True)]
    mean = statistics.fmean(losses)
    spread = T_95[len(losses) - 1] * statistics.stdev(losses) / len(losses) ** 0.5
    interval = (round(mean - spread, 2), round(mean + spread, 2))
    return {
        "points": round(mean, 2),
        "interval": interval,
        "by_seed": [round(x, 2) for x in losses],
    }


async def _trained_store(scenario: UsersScenario) -> MemoryStore:
    policy = _policy(scenario)
    store = await new_store(policy, scenario.seed)
    await Service(scenario, policy, store).become_ready()
    return store


def _policy(scenario: UsersScenario) -> TinyPolicy:
    return TinyPolicy([tenant_name(index) for index in range(scenario.num_attacked)])


def run_arm(scenario: UsersScenario, store: MemoryStore, seed: int, arm: str) -> ArmResult:
    """Run one arm with one seed."""
    return run_virtual_io(_run_arm(scenario, store, seed, arm))


async def _run_arm(scenario: UsersScenario, store: MemoryStore, seed: int, arm: str) -> ArmResult:
    rng = random.Random(1000 * scenario.seed + seed)
    sized = msgspec.structs.replace(
        scenario, num_tenants=scenario.num_attacked, users_per_tenant=scenario.attacked_users
    )
    honest = population(sized, rng)
    people = with_hostile(honest, arm, rng)
    service = Service(sized, _policy(scenario), store, further=[ATTACKER])
    async with service.running():
        client = UserClient(service.url, service.tokens)
        try:
            for number in range(scenario.num_rounds):
                basis = f"{scenario.seed}/{seed}/{number}"
                await _round(sized, client, people, basis, has_flood=arm == "flood")
                await asyncio.sleep(2 * TICK_S)
        finally:
            await client.close()
        return _result(service, client, honest, people)


def with_hostile(honest: list[Person], arm: str, rng: random.Random) -> list[Person]:
    """Return the users of an arm: of the honest ones, sybils take the places of some."""
    if not arm.startswith("sybils"):
        return honest
    num_sybils = round(len(honest) * int(arm.rpartition("_")[2]) / 100)
    turned = set(rng.sample(range(len(honest)), num_sybils))
    return [
        msgspec.structs.replace(person, is_contrary=number in turned)
        for number, person in enumerate(honest)
    ]


async def _round(
    scenario: UsersScenario,
    client: UserClient,
    people: list[Person],
    basis: str,
    *,
    has_flood: bool,
) -> None:
    """Have as many users ask and rate as make one version, and the attacker as often as it can.

    Every request has random numbers of its own, made of `basis` and its place: those of the users
    are the same whatever the attacker does.
    """
    rng = random.Random(basis)
    asking = [(person, f"{basis}/{place}") for place, person in enumerate(
        rng.sample(people, scenario.epoch_samples)
    )]  # fmt: skip
    if has_flood:
        hostile = random.Random(f"{basis}/flood")
        for place in range(scenario.attack_ratio * scenario.epoch_samples):
            attacker = Person(
                name=ATTACKER, tenant=ATTACKER, speaks_as=hostile.choice(people).tenant,
                taste=hostile.randrange(2), leaning=1.0, phase=0.0, is_contrary=True,
            )  # fmt: skip
            asking.append((attacker, f"{basis}/flood/{place}"))
        hostile.shuffle(asking)
    async with asyncio.TaskGroup() as group:
        for person, own in asking:
            group.create_task(_ask_and_rate(scenario, client, person, random.Random(own)))


async def _ask_and_rate(
    scenario: UsersScenario, client: UserClient, person: Person, rng: random.Random
) -> None:
    topic, seed, rating = rng.choice(TOPICS), rng.getrandbits(31), random.Random(rng.random())
    reply = await client.ask(person, topic, seed)
    if reply is not None:
        is_accepted = person.rates(reply.traits, 0.0, scenario.noise, rating)
        await client.rate(person, reply, is_accepted=is_accepted)


def _result(
    service: Service, client: UserClient, honest: list[Person], people: list[Person]
) -> ArmResult:
    hostile = {(ATTACKER, ATTACKER)} | {
        (each.tenant, each.name) for each in people if each.is_contrary
    }
    names = service.pseudonyms(hostile)
    entries = [sample for manifest in service.manifests() for sample in manifest.live]
    trained = [sample for sample in entries if sample.outcome.is_trained]
    theirs = [sample for sample in trained if (sample.tenant, sample.user) in names]
    pull = sum(abs(sample.advantage) for sample in trained)
    last = service.version
    if not trained:
        raise PenstockError("simulate users: no sample was trained")

    def acceptance(version: int) -> float:
        return service.policy.acceptance(service.publisher.snapshots[version], honest, 0.0)

    ends = [acceptance(version) for version in range(last - last // 2, last + 1)]

    return ArmResult(
        acceptance_before=acceptance(0),
        acceptance=statistics.fmean(ends),
        num_versions=last,
        hostile_share=len(theirs) / len(trained),
        hostile_pull=sum(abs(sample.advantage) for sample in theirs) / pull,
        num_capped=sum(sample.outcome is Outcome.CAPPED for sample in entries),
        num_refused=client.num_refused,
        num_failed=client.num_failed,
    )
