"""Sharing beginnings changes what is computed, not what comes out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.actors.policy.packing import pack_tree
from penstock.kernels.reference.routing import ROUTE_FREE

CONFIG = PolicyConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, head_dim=16, moe_intermediate_size=32
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sequences():
    """Two groups that share a beginning; some members share more, one is another's beginning."""
    random = np.random.default_rng(0)

    def draw(count):
        return random.integers(0, CONFIG.vocab_size, count)

    system, first, second = draw(20), draw(30), draw(25)
    common = np.concatenate([system, first, draw(18)])
    return [
        np.concatenate([common, draw(9)]),
        np.concatenate([common, draw(5)]),
        common,
        np.concatenate([system, first, draw(3)]),
        np.concatenate([system, second, draw(7)]),
        np.concatenate([system, second, draw(11)]),
        draw(4),
    ]


def logprobs(policy, output, rows, targets):
    return token_logprobs(policy.logits(output.hidden[rows]), targets)


def test_losses_and_gradients_equal_those_of_the_sequences_apart():
    policy, ids = Policy(CONFIG, seed=0), sequences()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
        routes = [policy(torch.from_numpy(s), [len(s)]).routed_experts.numpy() for s in ids]
    random = np.random.default_rng(1)
    targets = [torch.from_numpy(random.integers(0, CONFIG.vocab_size, len(s))) for s in ids]
    weights = torch.randn(sum(map(len, ids)), generator=torch.Generator().manual_seed(0))

    tree = pack_tree(ids, routes)
    output = policy(
        torch.from_numpy(tree.input_ids),
        tree.lengths,
        torch.from_numpy(tree.routed_experts),
        tree.parents,
    )
    shared = logprobs(policy, output, np.concatenate(tree.places), torch.cat(targets))
    (shared * weights).sum().backward()
    shared_gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    assert output.router_mismatch == 0.0
    assert tree.input_ids.size < 0.6 * sum(map(len, ids))

    policy.zero_grad(set_to_none=True)
    whole = policy(
        torch.from_numpy(np.concatenate(ids)),
        [len(s) for s in ids],
        torch.from_numpy(np.concatenate(routes)),
    )
    apart = logprobs(policy, whole, slice(None), torch.cat(targets))
    (apart * weights).sum().backward()
    torch.testing.assert_close(shared, apart, rtol=1e-4, atol=1e-5)
    for name, gradient in shared_gradients.items():
        expected = dict(policy.named_parameters())[name].grad
        assert (gradient - expected).norm() <= 1e-4 * expected.norm(), name


def test_tokens_with_other_routes_are_not_shared():
    ids = np.arange(40)
    routes = np.zeros((40, 2, 2), dtype=np.uint8)
    other = routes.copy()
    other[20:, 1, 0] = 3
    assert pack_tree([ids, ids], [routes, routes]).input_ids.size == 40
    tree = pack_tree([ids, ids], [routes, other])
    assert tree.lengths == [20, 20, 20]
    assert tree.parents == [-1, 0, 0]


def no_routes(ids):
    return [np.full((len(s), 1, 1), ROUTE_FREE) for s in ids]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=50), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_every_sequence_reads_its_own_tokens_along_its_own_chain(lists):
    ids = [np.repeat(np.array(values), 10) for values in lists]
    tree = pack_tree(ids, no_routes(ids))
    assert sum(tree.lengths) == tree.input_ids.size
    ends = np.cumsum(tree.lengths)
    piece_of = np.repeat(np.arange(len(ends)), tree.lengths)
    for sequence, places in zip(ids, tree.places, strict=True):
        np.testing.assert_array_equal(tree.input_ids[places], sequence)
        chain = list(dict.fromkeys(piece_of[places].tolist()))
        assert [tree.parents[piece] for piece in chain] == [-1, *chain[:-1]]
        assert sum(tree.lengths[piece] for piece in chain) == len(sequence)


def test_a_wrong_tree_is_refused():
    policy = Policy(CONFIG, seed=0)
    for parents in ([0], [-1, 1], [-1, -2]):
        with pytest.raises(ValueError, match="parents"):
            policy(torch.arange(6), [3, 3], None, parents)
