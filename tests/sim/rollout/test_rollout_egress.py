"""What programs tried to reach stays with the rollout, whichever of its machines they ran in."""

import msgspec
import pytest
from tests.sim.rollout.conftest import FINISH, FIX, LOOK, World, make_task
from tests.sim.rollout.conftest import make_command as command_of
from tests.sim.rollout.machines import FakeMachine
from tests.sim.rollout.saving import SavingBackend

from penstock.actors.pacer.actor import group_commands
from penstock.actors.pacer.config import PacerConfig, TreeConfig
from penstock.envs.egress.rules import parse_rules
from penstock.messages.episode import EpisodeSaved
from penstock.messages.rollout import EgressAttempt, EpisodeEnd, RolloutFinished, TurnSampled

GREP = ("grep", {"pattern": "double"})
REFUSED = EgressAttempt(
    method="GET", target="evil.test:80", is_allowed=False, reason="not on the allow-list"
)


class OpenBackend(SavingBackend):
    """Its machines have a way out; a program that greps knocks at a refused host."""

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> FakeMachine:
        machine = await super().start(cpu=cpu, timeout_s=timeout_s)
        attempts: list[EgressAttempt] = []
        run = machine._run

        async def run_on_record(argv, options):
            if argv[0] == "grep":
                attempts.append(REFUSED)
            return await run(argv, options)

        async def allow_egress(rules, *, allows_addresses=False):
            parse_rules(rules, allows_addresses=allows_addresses)

        async def egress_attempts():
            return list(attempts)

        machine._run = run_on_record
        machine.allow_egress, machine.egress_attempts = allow_egress, egress_attempts
        return machine


def start(world: World, folder, scripts) -> None:
    world.backend = OpenBackend()
    world.policy.scripts = scripts
    world.policy.token_s = 0.05
    world.host(world.policy)
    world.host_machines(checkpoints=str(folder / "saved"))


def open_task():
    return msgspec.structs.replace(make_task(), egress=["good.test:80"])


def refused(rollout: RolloutFinished) -> int:
    assert all(one.target == REFUSED.target for one in rollout.egress)
    return sum(one.num_attempts for one in rollout.egress)


@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_what_a_saved_machine_had_on_record_stays(simulate, tmp_path, num_turns: int) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path, lambda _: [[GREP], [FIX], [GREP], [LOOK], [FINISH]])
        worker = world.host_worker(checkpoint_turns=1)
        await world.publish(command_of("g0-m0", open_task()))
        await world.wait_for(TurnSampled, num_turns)
        await world.sleep(0.1)
        await worker.kill()
        world.host_worker(checkpoint_turns=1)
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert len(world.backend.copies) == 1
        assert refused(rollout) == 2
        saved = await world.read(EpisodeSaved)
        assert [sum(one.num_attempts for one in event.egress) for event in saved] == [1, 1, 2, 2]

    simulate(scenario)


@pytest.mark.parametrize("checkpoint_turns", [0, 1])
def test_what_a_machine_that_died_had_on_record_stays(simulate, tmp_path, checkpoint_turns) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path, lambda _: [[LOOK], [GREP], [FIX], [GREP], [FINISH]])
        world.backend.deaths[0] = 4  # In the turn after the first attempt.
        world.host_worker(checkpoint_turns=checkpoint_turns)
        await world.publish(command_of("g0-m0", open_task()))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.FINISHED
        # Without a saved state the first attempt was made once more, in the next machine.
        assert refused(rollout) == 3 - checkpoint_turns

    simulate(scenario)


def test_a_branch_tells_its_trunks_attempts_with_its_own(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        scripts = {"g0-m0": [[GREP], [FIX], [FINISH]], "g0-m1": [[], [GREP], [FINISH]],
                   "g0-m2": [[], [FIX], [FINISH]]}  # fmt: skip
        start(world, tmp_path, lambda session: scripts[session])
        world.host_worker()
        config = PacerConfig(group_size=3, tree=TreeConfig(trunk_turns=1, branches=3))
        [command] = group_commands(config, 0, open_task(), 0)
        await world.publish(command)
        ends = {one.rollout_id: one for one in await world.wait_for(RolloutFinished, 3)}
        assert len(world.backend.copies) == 2
        assert [refused(ends[f"g0-m{n}"]) for n in range(3)] == [1, 2, 1]

    simulate(scenario)


def test_an_address_of_a_task_is_refused_unless_the_host_allows_it(simulate, tmp_path) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path, lambda _: [[FINISH]])
        world.host_worker()
        inner = msgspec.structs.replace(make_task(), egress=["x.test:80@169.254.169.254"])
        await world.publish(command_of("g0-m0", inner))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert "sandbox_host.egress_addresses" in rollout.error

    simulate(scenario)
