"""The parts of `simulate-users`: replies, likings, virtual time with sockets, figures."""

import asyncio
import importlib.util
import json
import math
import random
import time

import msgspec
import numpy as np
import pytest
import torch
from tests.lab.__main__ import main
from tests.lab.simulate.users import attack, latency
from tests.lab.simulate.users.attack import shift_of, with_hostile
from tests.lab.simulate.users.client import Reply
from tests.lab.simulate.users.command import FIGURES
from tests.lab.simulate.users.learning import simulate_learning
from tests.lab.simulate.users.people import ALL_TRAITS, ReplyTraits, delay_s, population
from tests.lab.simulate.users.results import Results
from tests.lab.simulate.users.settings import DAY_S, UsersScenario
from tests.lab.simulate.users.tiny_policy import TOPICS, TinyPolicy, reply_text, traits_of
from tests.lab.simulate.users.virtual_io import now_real, run_virtual_io

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.model import Policy
from penstock.messages.errors import CodecError, ConfigError


def test_every_reply_is_told_from_every_other():
    policy = TinyPolicy(["A"])
    for traits in ALL_TRAITS:
        parsed = policy.chat.parse_turn(policy.reply_ids(traits))
        assert traits_of(parsed.text, bool(parsed.calls)) == traits
    assert len({reply_text(traits) for traits in ALL_TRAITS}) == len(ALL_TRAITS) / 2
    assert traits_of("anything else", has_call=False) is None


def test_a_reply_has_the_probability_of_its_tokens_one_after_the_other():
    tiny = TinyPolicy(["A", "B"])
    model = Policy(tiny.config, seed=1)
    snapshot = {name: as_numpy(each) for name, each in publishable_state(model).items()}
    found = tiny.reply_probabilities(snapshot)
    for place, traits in enumerate(ALL_TRAITS):
        reply, total = tiny.reply_ids(traits), 0.0
        for topic in TOPICS:
            ids = [*tiny.prompt_ids("B", topic), *reply]
            with torch.no_grad():
                logits = model.logits(model(torch.tensor(ids[:-1]), [len(ids) - 1]).hidden)
            chances = logits.double().softmax(-1)[-len(reply) :]
            total += float(chances[range(len(reply)), reply].prod())
        assert np.log(found["B"][place]) == pytest.approx(math.log(total / len(TOPICS)), abs=1e-2)


def test_honest_users_like_what_they_want_and_hostile_ones_the_opposite():
    rng = random.Random(1)
    person = population(UsersScenario(), rng)[0]
    wanted, unwanted = ReplyTraits(False, True, False, 0), ReplyTraits(True, False, True, 1)
    assert person.likes(wanted, 0.0) > 0.8 > 0.2 > person.likes(unwanted, 0.0)
    assert person.likes(None, 0.0) == 0.0
    hostile = msgspec.structs.replace(person, is_contrary=True)
    rates = [
        sum(who.rates(traits, 0.0, 0.1, rng) for _ in range(500)) / 500
        for who, traits in ((person, wanted), (person, unwanted), (hostile, wanted))
    ]
    assert rates[0] > 0.7 and rates[1] < 0.35 and rates[2] < 0.3


def test_delays_are_long_and_bounded():
    scenario, rng = UsersScenario(), random.Random(2)
    drawn = [delay_s(scenario, rng) for _ in range(20_000)]
    assert min(drawn) == 10.0 and max(drawn) == 3 * DAY_S
    assert sorted(drawn)[10_000] == pytest.approx(1800.0, rel=0.1)


def test_sybils_take_the_places_of_honest_users():
    honest = population(UsersScenario(num_tenants=20, users_per_tenant=5), random.Random(0))
    for arm, num in (("honest", 0), ("flood", 0), ("sybils_1", 1), ("sybils_5", 5)):
        people = with_hostile(honest, arm, random.Random(0))
        assert len(people) == 100 and sum(person.is_contrary for person in people) == num


def test_a_shift_comes_with_its_interval():
    shift = shift_of([0.70, 0.70, 0.70, 0.70], [0.69, 0.70, 0.69, 0.70])
    assert shift["points"] == 0.5 and shift["interval"][0] < 0.5 < shift["interval"][1]


class Listening:
    """A client whose requests are noted and answered alike."""

    def __init__(self):
        self.asked, self.rated = [], []

    async def ask(self, person, topic, seed):
        self.asked.append((person.tenant, person.name, topic, seed))
        return Reply(request_id="r", traits=ALL_TRAITS[seed % len(ALL_TRAITS)])

    async def rate(self, person, reply, *, is_accepted):
        self.rated.append((person.tenant, person.name, reply.traits, is_accepted))


def test_arms_have_the_users_random_numbers_in_common():
    scenario = UsersScenario(num_tenants=6, users_per_tenant=8, epoch_samples=16)
    people = population(scenario, random.Random(0))

    def round_of(people, has_flood):
        client = Listening()
        asyncio.run(attack._round(scenario, client, people, "0/0/3", has_flood=has_flood))
        return client

    alone, flooded = round_of(people, False), round_of(people, True)
    assert len(flooded.asked) == 16 * 6
    assert {one for one in flooded.asked if one[0] != "z"} == set(alone.asked)
    assert {one for one in flooded.rated if one[0] != "z"} == set(alone.rated)
    turned = round_of(with_hostile(people, "sybils_5", random.Random(1)), False)
    assert turned.asked == alone.asked


def test_what_is_finished_is_not_run_again_and_is_of_one_scenario(tmp_path, monkeypatch):
    scenario = UsersScenario(num_attack_seeds=2, num_rounds=3)
    result = attack.ArmResult(
        acceptance_before=0.3, acceptance=0.5, num_versions=3, hostile_share=0.0,
        hostile_pull=0.0, num_capped=0, num_refused=0, num_failed=0,
    )  # fmt: skip
    results = Results(scenario, tmp_path / "new")
    for arm in attack.ARMS:
        for seed in range(2):
            results.write(f"attack-{arm}-{seed}", result)
    nothing = asyncio.sleep(0)
    monkeypatch.setattr(attack, "_trained_store", lambda _: nothing)
    found = attack.simulate_attack(scenario, results)
    assert found["shifts"]["flood"]["by_seed"] == [0.0, 0.0]
    more = Results(msgspec.structs.replace(scenario, num_attack_seeds=3), tmp_path / "new")
    assert more.read("attack-flood-1", attack.ArmResult) == result
    assert more.read("attack-flood-2", attack.ArmResult) is None
    other = Results(msgspec.structs.replace(scenario, num_rounds=4), tmp_path / "new")
    with pytest.raises(ConfigError, match=r"attack-flood-0\.json: of another scenario"):
        other.read("attack-flood-0", attack.ArmResult)
    (tmp_path / "new" / "attack-flood-0.json").write_text("[")
    with pytest.raises(CodecError):
        results.read("attack-flood-0", attack.ArmResult)
    assert Results(scenario, None).read("attack-flood-1", attack.ArmResult) is None


def test_a_whole_simulation_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    """A part that fails takes none of those before it along."""
    Results(UsersScenario(), tmp_path).write("learning", {"trained_share": 0.5})
    ran: list[str] = []

    def part(name, figure):
        def simulate(*_):
            ran.append(name)
            if name == "latency" and ran.count(name) == 1:
                raise ConfigError("no")
            return {figure: 1.5, "failed_requests": 1}

        monkeypatch.setattr(f"tests.lab.simulate.users.{name}.simulate_{name}", simulate)

    for name, figure in (
        ("learning", "trained_share"), ("attack", "attacker_shift"),
        ("aa", "aa_false_decisions"), ("latency", "feedback_to_served_s_p50"),
    ):  # fmt: skip
        part(name, figure)
    (tmp_path / "runs" / "r1").mkdir(parents=True)
    (tmp_path / "runs" / "r1" / "config.toml").touch()
    command = ["--runs-dir", str(tmp_path / "runs"), "simulate-users", "--json"]
    command += ["--results", str(tmp_path)]
    assert main(command) != 0
    assert main(command) == 0
    assert ran == ["attack", "aa", "latency", "attack", "latency"]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(FIGURES) <= set(found)
    assert (found["trained_share"], found["aa_false_decisions"]) == (0.5, 1.5)
    assert found["failed_requests"] == 3


def test_a_run_that_does_not_exist_is_missed_before_anything_is_simulated(tmp_path, capsys):
    assert main(["--runs-dir", str(tmp_path), "simulate-users", "--run", "none"]) != 0
    assert "simulating" not in capsys.readouterr().err


def test_without_the_client_of_users_the_command_says_how_to_get_it(monkeypatch, capsys):
    there = importlib.util.find_spec
    without = lambda name: None if name == "openai" else there(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert main(["simulate-users", "--part", "aa"]) != 0
    assert "pip install -e '.[lab]'" in capsys.readouterr().err


def test_days_pass_at_once_and_sockets_are_served():
    async def talk():
        async def echo(reader, writer):
            writer.write(await reader.readline())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        await asyncio.sleep(3 * DAY_S)
        with now_real():
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello\n")
            answer = await reader.readline()
            assert await asyncio.to_thread(lambda: 7) == 7
        writer.close()
        server.close()
        return answer, asyncio.get_running_loop().time()

    began = time.perf_counter()
    answer, now_s = run_virtual_io(talk())
    assert answer == b"hello\n" and now_s >= 3 * DAY_S > time.perf_counter() - began


def test_a_part_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["simulate-users", "--part", "wizardry"])
    assert "learning" in capsys.readouterr().err


def test_the_real_actors_answer_take_feedback_and_train():
    """On a policy of nothing: what matters is that all of them are there."""
    scenario = UsersScenario(
        num_tenants=1, users_per_tenant=1, num_days=1, requests_per_hour=1, silent_share=0.0,
        midtrain_tokens=2048, epoch_samples=4, delay_s_max=20.0,
    )  # fmt: skip
    found = simulate_learning(scenario)
    assert found["failed_requests"] == 0 and found["num_requests"] == 24
    assert found["trained_share"] > 0.9 and found["num_versions"] >= 2
    assert set(found["wanted_after"]) == {"short", "uses_tool", "plain", "tenant_taste"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ratings_of_up_to_three_days_reach_the_policy():
    found = simulate_learning(UsersScenario(num_days=5))
    assert found["failed_requests"] == 0
    assert found["trained_share"] >= 0.95
    used = found["acceptance_by_day"][:-1]  # The last one is of days with late ratings alone.
    assert used[-1][1] > found["acceptance_before"] + 0.1
    assert set(FIGURES) & set(found)


def test_a_rating_is_served_once_a_version_that_trained_it_samples():
    times = latency._Times()
    times.rated = {"local.a": 10.0, "local.b": 11.0, "local.c": 12.0, "local.d": 13.0}
    times.first_token = {"q1": 9.0, "q2": 14.0, "q3": 20.0, "q4": 11.0}
    served = {"q1": 5, "q2": 6, "q3": 8, "unknown": 9}
    waits = times.waits_s({"local.a": 6, "local.b": 7, "local.d": 9}, served)
    assert waits == [4.0, 9.0, math.inf], "by q2, q3 and nobody; local.c was not trained"
    assert latency._quantile(waits, 0.5) == 9.0
    assert latency._quantile(waits, 0.95) is None, "what is never served is not left out"
