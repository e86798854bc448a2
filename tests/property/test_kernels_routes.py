"""Packed routes come back, and damaged, missing or stale ones are refused."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from tests.simt.shim import SIMT

from penstock.kernels import ops
from penstock.kernels.backend import KernelArgumentError
from penstock.kernels.reference.routing import replay_experts
from penstock.kernels.route_segments import HEADER_BYTES, open_routes, seal_routes
from penstock.messages.errors import CorruptDataError

CALM = settings(deadline=None, max_examples=60)
SIZES = st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 9))
EXPERTS = st.one_of(st.integers(1, 40), st.sampled_from([64, 256, 257, 384, 1 << 15]))


@st.composite
def routes(draw, num_experts):
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_experts, draw(SIZES), generator=generator).to(torch.int16)


@CALM
@given(st.data(), EXPERTS)
def test_ids_come_back_in_as_few_bits_as_they_need(data, num_experts):
    ids = data.draw(routes(num_experts))
    packed = ops.routes_pack(ids, num_experts)
    width = max(1, (num_experts - 1).bit_length())
    assert packed.shape == (
        len(ids),
        -(-ids[0:1].numel() * width // 8) if len(ids) else packed.shape[1],
    )
    assert torch.equal(ops.routes_pack(ids, num_experts, backend=SIMT), packed)
    segment = seal_routes(ids, num_experts=num_experts, policy_version=7, first_position=3)
    opened = open_routes(segment)
    assert torch.equal(opened.routes, ids)
    assert (opened.first_position, opened.policy_version) == (3, 7)


def test_a_token_of_sixty_layers_takes_540_bytes():
    ids = torch.randint(0, 384, (10, 60, 8), dtype=torch.int16)
    segment = seal_routes(ids, num_experts=384, policy_version=0)
    assert len(segment) == HEADER_BYTES + 10 * 540


@CALM
@given(st.data())
def test_a_cut_or_flipped_segment_is_refused(data):
    ids = data.draw(routes(384))
    segment = seal_routes(ids, num_experts=384, policy_version=1)
    place = data.draw(st.integers(0, len(segment) - 1))
    with pytest.raises(CorruptDataError):
        open_routes(segment[:place])
    damaged = bytearray(segment)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptDataError):
        open_routes(bytes(damaged))


def test_an_id_that_was_not_recorded_is_not_sealed():
    with pytest.raises(KernelArgumentError, match="expert ids"):
        seal_routes(torch.full((1, 2, 3), -1), num_experts=8, policy_version=0)


@CALM
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5, 0.99]))
def test_replay_takes_what_was_recorded_unless_it_is_implausible(seed, share):
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn(12, 20, generator=generator).softmax(-1)
    recorded = torch.stack([torch.randperm(20, generator=generator)[:4] for _ in range(12)])
    own = every.topk(4, dim=-1).indices
    replayed = replay_experts(own, every, recorded, share)
    scores, least = every.gather(1, recorded), share * every.topk(4).values[:, -1:]
    assume(bool((scores - least).abs().min() > 1e-6))
    is_kept = scores >= least
    is_own = (recorded[:, :, None] == own[:, None]).any(2)
    assert bool(is_kept[is_own].all()), "what the router would choose itself stays"
    assert torch.equal(replayed.ids[is_kept], recorded[is_kept])
    for t in range(12):
        assert len(set(replayed.ids[t].tolist())) == 4
        fresh = set(replayed.ids[t][~is_kept[t]].tolist())
        assert fresh <= set(own[t].tolist())
    missing = (recorded[:, :, None] != own[:, None]).all(2).sum(1)
    assert torch.equal(replayed.num_mismatched, missing)
    again = replay_experts(own, every, own, share)
    assert torch.equal(again.ids, own)
    assert not again.num_mismatched.any()
