"""Recorded routes: sealed on their way, replayed or replaced by rule, refused if unfit."""

import msgspec
import numpy as np
import pytest
import torch

from penstock.actors.generator.actor import seal_chunk
from penstock.actors.generator.engine import TokenChunk
from penstock.actors.policy.config import NumericsConfig, PolicyConfig
from penstock.actors.policy.exact import ExactForward, LogprobRequest
from penstock.actors.policy.model import Policy
from penstock.actors.policy.packing import pack_tree
from penstock.actors.trainer.distribution import NotReproducibleError
from penstock.actors.trainer.routes import MissingRoutesError, StaleRoutesError, rollout_routes
from penstock.actors.trainer.sequences import check_trajectory
from penstock.kernels import native
from penstock.kernels.arrays import to_array
from penstock.kernels.reference.routing import ROUTE_FREE, replay_experts
from penstock.kernels.route_segments import HEADER_BYTES
from penstock.messages.errors import CorruptDataError
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.task import Sampling

SHAPE = (3, 2)
NUM_EXPERTS = 8


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def routes_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, NUM_EXPERTS, (count, *SHAPE)).astype(np.uint8)


def spans(*pairs):
    return [VersionSpan(policy_version=v, num_tokens=n) for v, n in pairs]


def turn(num_context, num_sampled, routes, routes_from, *, routed=None, sampled=None, **fields):
    """A turn whose routes were computed by the versions `routed`, its tokens by `sampled`."""
    chunk = TokenChunk(
        token_ids=np.zeros(num_sampled, np.int32),
        behavior_logprobs=np.zeros(num_sampled, np.float32),
        policy_version=0,
        stop_reason=StopReason.STOP,
        routed_experts=routes,
        routes_from=routes_from,
        route_spans=tuple(routed or spans((0, len(routes)))),
    )
    return Turn(
        context_ids=to_array(np.ones(num_context, np.int32)),
        token_ids=to_array(chunk.token_ids),
        behavior_logprobs=to_array(chunk.behavior_logprobs),
        version_spans=sampled or spans((0, num_sampled)),
        stop_reason=StopReason.STOP,
        route_segments=seal_chunk(chunk, NUM_EXPERTS),
        sampling=Sampling(),
        **fields,
    )


def test_suffixes_join_to_all_positions_but_the_last():
    routes = routes_of(29)
    turns = [turn(10, 5, routes[:14], 0), turn(7, 8, routes[14:], 14)]
    np.testing.assert_array_equal(rollout_routes(turns), routes)


def test_an_update_in_flight_makes_two_segments():
    routes = routes_of(14)
    one = turn(10, 5, routes, 0, routed=spans((3, 11), (4, 3)), sampled=spans((3, 2), (4, 3)))
    assert len(one.route_segments) == 2
    np.testing.assert_array_equal(rollout_routes([one]), routes)


def test_positions_computed_anew_take_the_place_of_what_was_recorded():
    first, again = routes_of(14, 1), routes_of(29, 2)
    turns = [
        turn(10, 5, first, 0),
        turn(7, 8, again, 0, routed=spans((1, 29)), sampled=spans((1, 8))),
    ]
    np.testing.assert_array_equal(rollout_routes(turns), again)


def test_a_position_takes_the_bits_of_the_design():
    routes = np.random.default_rng(0).integers(0, 384, (100, 60, 8)).astype(np.int16)
    chunk = TokenChunk(
        token_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        policy_version=0,
        routed_experts=routes,
        route_spans=tuple(spans((0, 100))),
    )
    (segment,) = seal_chunk(chunk, 384)
    assert len(segment) == HEADER_BYTES + 100 * 540


def test_what_is_missing_is_refused():
    routes = routes_of(29)
    for turns in (
        [turn(10, 5, routes[:13], 0)],
        [turn(10, 5, routes[:13], 1)],
        [turn(10, 5, routes[:14], 0), turn(7, 8, routes[15:], 15)],
        [turn(10, 5, routes[:4], 10)],
    ):
        with pytest.raises(MissingRoutesError):
            rollout_routes(turns)


def test_what_is_stale_is_refused():
    routes = routes_of(14)
    with pytest.raises(StaleRoutesError, match="token 2 is of policy version 4, its routes of 3"):
        rollout_routes(
            [turn(10, 5, routes, 0, routed=spans((3, 14)), sampled=spans((3, 2), (4, 3)))]
        )
    with pytest.raises(StaleRoutesError, match="beyond position 13"):
        rollout_routes([turn(10, 5, routes_of(15), 0)])


def test_what_is_damaged_is_refused():
    good = turn(10, 5, routes_of(14), 0)
    (segment,) = good.route_segments
    for at in (5, HEADER_BYTES - 1, HEADER_BYTES, len(segment) - 1):
        bad = bytearray(segment)
        bad[at] ^= 1
        damaged = Turn(**{n: getattr(good, n) for n in good.__struct_fields__}
                       | {"route_segments": [bytes(bad)]})  # fmt: skip
        with pytest.raises(CorruptDataError):
            rollout_routes([damaged])


@pytest.mark.parametrize(
    ("arithmetic", "mode", "expert_format"),
    [
        ("native/mxfp8", "fast", "bf16"),
        ("native/bf16", "fast", "mxfp8"),
        ("torch/bf16", "exact", "bf16"),
    ],
)
def test_another_arithmetic_is_refused(arithmetic, mode, expert_format):
    numerics = NumericsConfig(mode=mode, expert_format=expert_format)
    config = PolicyConfig(num_hidden_layers=3, numerics=numerics)
    good = turn(10, 5, routes_of(14), 0, arithmetic=f"native/{expert_format}")
    check_trajectory("r", [good], config)
    with pytest.raises(NotReproducibleError, match=r"expert_format|native"):
        check_trajectory("r", [turn(10, 5, routes_of(14), 0, arithmetic=arithmetic)], config)


def test_an_implausible_expert_gives_way_to_the_best_that_is_free():
    scores = torch.tensor([[0.05, 0.6, 0.3, 0.05]] * 4)
    ids = torch.tensor([[1, 2], [0, 1], [0, 3], [2, 0]])
    expected = [[1, 2], [2, 1], [1, 2], [2, 1]]
    choice = replay_experts(scores.topk(2).indices, scores, ids, 0.25)
    assert choice.ids.tolist() == expected


def test_what_is_plausible_is_relative_to_the_routers_own_choice():
    """Composer 2: a spread-out router keeps its experts, a sharp one rejects what is far below."""
    spread = torch.tensor([[0.13, 0.12, 0.11, 0.10, 0.14, 0.13, 0.14, 0.13]])
    sharp = torch.tensor([[0.50, 0.30, 0.11, 0.05, 0.01, 0.01, 0.01, 0.01]])
    recorded = torch.tensor([[4, 2]])
    kept = replay_experts(spread.topk(2).indices, spread, recorded, 0.5)
    assert kept.ids.tolist() == [[4, 2]]
    replaced = replay_experts(sharp.topk(2).indices, sharp, recorded, 0.5)
    assert replaced.ids.tolist() == [[0, 1]]


@pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("plausible", [0.0, 0.9])
def test_both_steps_replay_alike(plausible):
    config = PolicyConfig(
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=3,
        head_dim=16,
        moe_intermediate_size=32,
        numerics=NumericsConfig(plausible=plausible),
    )
    policy = Policy(config, seed=0).requires_grad_(False)
    for parameter in policy.parameters():
        parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    ids = np.random.default_rng(0).integers(0, 90, 60)
    recorded = routes_of(60).astype(np.int64)
    recorded[..., 1] = (recorded[..., 0] + 1 + recorded[..., 1] % 7) % NUM_EXPERTS
    recorded[50:] = ROUTE_FREE
    tree = pack_tree([ids], [recorded])
    exact = ExactForward(policy, plausible).run(tree, LogprobRequest.plain(np.arange(59), ids[1:]))
    output = policy(torch.from_numpy(ids), [60], torch.from_numpy(recorded))
    assert torch.equal(output.routed_experts.long(), exact.routed_experts)
    torch.testing.assert_close(output.flips.int(), torch.from_numpy(exact.flips[:, 0]))
    assert (exact.flips[:, 1].sum() > 0) == (plausible > 0)
    kept = (exact.routed_experts[:50].numpy() == recorded[:50]).mean()
    assert kept == 1.0 if plausible == 0 else kept < 1.0


def test_wrong_settings_are_refused():
    for wrong in ({"mode": "slow"}, {"plausible": 1.0}, {"expert_format": "fp4"},
                  {"mode": "exact", "expert_format": "nvfp4"}):  # fmt: skip
        with pytest.raises(msgspec.ValidationError, match=next(reversed(wrong))):
            msgspec.convert(wrong, NumericsConfig)
    with pytest.raises(ValueError, match="multiples of 32"):
        PolicyConfig(hidden_size=48, numerics=NumericsConfig(expert_format="mxfp8"))
