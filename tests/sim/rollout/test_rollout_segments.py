"""Episodes of several segments: budgets of the chain, kills in any of them, machines, branches."""

import pytest
from tests.sim.rollout.conftest import (
    FINISH,
    FIX,
    FIXED,
    LOOK,
    ScriptedPolicy,
    World,
    make_command,
    make_task,
)
from tests.sim.rollout.saving import SavingBackend
from tests.sim.rollout.test_rollout_episode import int32_list
from tests.sim.rollout.test_rollout_tree import tree_command

from penstock.actors.policy.summaries import SummaryConfig, SummaryMode
from penstock.kernels.route_segments import open_routes
from penstock.messages.episode import EpisodeSaved
from penstock.messages.generation import Generate
from penstock.messages.reading.trajectories import segments
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, TurnSampled

KEPT = "I looked.\nSummary: double is wrong"
REQUEST = "Sum up."
CALLS = [[LOOK], [LOOK], [FIX], [LOOK], [LOOK], [LOOK], [FINISH]]
LIMITS = {"num_segments_max": 4, "num_turns_max": 12, "window_tokens_max": 150}


class SummingPolicy(ScriptedPolicy):
    """Sums up where it is asked to; its other turns are the script's, over all segments."""

    said = KEPT

    def __init__(self, world: World) -> None:
        super().__init__(world.tokenizer)
        self.summaries: dict[str, set[int]] = {}
        self.scripts = lambda _session: CALLS
        self.token_s = 0.05

    def turn_ids(self, session: str, index: int) -> list[int]:
        before = self.summaries.setdefault(session, set())
        if index in before:
            return self._chat.render_turn(self.said)
        return super().turn_ids(session, index - sum(each < index for each in before))

    def _turn_index(self, request: Generate) -> int:
        session = request.session_id
        index = int(request.request_id.removeprefix(f"{session}.").split("-")[0])
        if self._tokenizer.decode(int32_list(request.token_ids)[-12:]).count(REQUEST):
            self.summaries.setdefault(session, set()).add(index)
        return index


def start(world: World, folder=None) -> None:
    world.policy = SummingPolicy(world)
    world.host(world.policy)
    if folder is None:
        world.host_machines()
    else:
        world.backend = SavingBackend()
        world.host_machines(checkpoints=str(folder / "saved"))


def settings(mode: SummaryMode = SummaryMode.TRAINED, **changes: object) -> dict[str, object]:
    summary = SummaryConfig(mode=mode, trigger=0.45, num_tokens_max=40, request=REQUEST)
    return {"summary": summary, **changes}


async def finished(world: World) -> RolloutFinished:
    [rollout] = await world.wait_for(RolloutFinished, 1)
    await world.check_ledger()
    return rollout


def check_chain(world: World, rollout: RolloutFinished) -> None:
    """Check files, calls, and that each turn's request was its segment so far."""
    assert rollout.end is EpisodeEnd.FINISHED
    assert rollout.files == {"m.py": FIXED.encode()}
    assert [turn.calls[0].name for turn in rollout.turns if turn.calls] == [
        calls[0][0] for calls in CALLS
    ]
    answered = {int32s(r.token_ids): r for r in world.policy.requests}
    for segment in segments(rollout.turns):
        past: tuple[int, ...] = ()
        for turn in segment:
            past += int32s(turn.context_ids)
            request = answered[past]
            opened = [open_routes(part) for part in turn.route_segments]
            assert opened[0].first_position == request.routes_from == max(0, seen(past, turn) - 1)
            past += int32s(turn.token_ids)
        assert len(past) <= LIMITS["window_tokens_max"]


def int32s(array) -> tuple[int, ...]:
    return tuple(int32_list(array))


def seen(past, turn) -> int:
    """Return how many tokens of a segment came before a turn's context."""
    return len(past) - turn.context_ids.shape[0]


@pytest.mark.parametrize("mode", list(SummaryMode))
def test_an_episode_goes_on_in_a_new_context(simulate, mode) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.host_worker(**settings(mode))
        await world.publish(make_command("g0-m0", make_task(**LIMITS)))
        rollout = await finished(world)
        check_chain(world, rollout)
        assert rollout.num_segments >= 3
        num_asked = (rollout.num_segments - 1) * (mode is not SummaryMode.NONE)
        assert [turn.is_summary for turn in rollout.turns].count(True) == num_asked
        assert len({r.sampling.seed for r in world.policy.requests}) == len(rollout.turns)

    simulate(scenario)


@pytest.mark.parametrize(
    ("mode", "saves", "num_turns"),
    [
        *((SummaryMode.TRAINED, saves, n) for saves in (False, True) for n in range(1, 9)),
        *((SummaryMode.NONE, True, n) for n in range(1, 7)),
    ],
)
def test_a_killed_worker_loses_no_turn_in_any_segment(
    simulate, tmp_path, mode, saves, num_turns
) -> None:
    """One of these turns is the summary, which the worker is killed in the middle of."""

    async def scenario(world: World) -> None:
        start(world, tmp_path)
        changes = settings(mode, checkpoint_turns=int(saves))
        worker = world.host_worker(**changes)
        await world.publish(make_command("g0-m0", make_task(**LIMITS)))
        await world.wait_for(TurnSampled, num_turns)
        await world.sleep(0.1)
        await worker.kill()
        before = await world.read(TurnSampled)
        assert len(await world.read(EpisodeSaved)) == len(before) * saves
        world.host_worker(**changes)
        rollout = await finished(world)
        check_chain(world, rollout)
        assert rollout.turns[: len(before)] == [event.turn for event in before]
        assert len(world.policy.requests) <= len(rollout.turns) + 1
        assert len(world.backend.copies) == saves

    simulate(scenario)


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ("Summary:", EpisodeEnd.POLICY_ERROR),
        ("no mark", EpisodeEnd.POLICY_ERROR),
    ],
)
@pytest.mark.parametrize("mode", [SummaryMode.TRAINED, SummaryMode.MASKED])
def test_a_summary_that_is_none_is_the_policys_failure(simulate, said, end, mode) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.said = said
        world.host_worker(**settings(mode))
        await world.publish(make_command("g0-m0", make_task(**LIMITS)))
        rollout = await finished(world)
        assert (rollout.end, rollout.turns[-1].is_summary) == (end, True)
        assert rollout.turns[-1].is_withheld == (mode is SummaryMode.MASKED)

    simulate(scenario)


@pytest.mark.parametrize(
    ("bounds", "end"),
    [
        ({"num_segments_max": 2}, EpisodeEnd.TOKEN_LIMIT),
        ({"num_turns_max": 5}, EpisodeEnd.TURN_LIMIT),
        ({"num_tokens_max": 150}, EpisodeEnd.TOKEN_LIMIT),
    ],
)
def test_budgets_are_of_the_chain(simulate, bounds, end) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.policy.scripts = lambda _session: [[LOOK]] * 20
        world.host_worker(**settings())
        await world.publish(make_command("g0-m0", make_task(**{**LIMITS, **bounds})))
        rollout = await finished(world)
        assert rollout.end is end and 2 <= rollout.num_segments <= 4
        assert len(rollout.turns) <= LIMITS["num_turns_max"]

    simulate(scenario)


@pytest.mark.parametrize("trunk_turns", range(1, 7))
def test_branches_leave_a_trunk_in_any_segment(simulate, tmp_path, trunk_turns) -> None:
    async def scenario(world: World) -> None:
        start(world, tmp_path)
        world.host_worker(**settings())
        await world.publish(tree_command(trunk_turns=trunk_turns, **LIMITS))
        rollouts = await world.wait_for(RolloutFinished, 4)
        trunk = next(one for one in rollouts if one.trunk is None)
        for rollout in rollouts:
            assert rollout.end is EpisodeEnd.FINISHED
            assert rollout.turns[:trunk_turns] == trunk.turns[:trunk_turns]
            own = segments(rollout.own_turns)
            whole = segments(rollout.turns)
            joined = [ids_of(segment) for segment in whole][-len(own) :]
            assert [ids_of(segment) for segment in own] == joined
        await world.check_ledger()

    simulate(scenario)


def ids_of(segment) -> list[int]:
    return [
        i for turn in segment for ids in (turn.context_ids, turn.token_ids) for i in int32s(ids)
    ]
