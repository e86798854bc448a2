"""Attention over packed trees, against scores of all pairs under an explicit mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

pytest.importorskip("transformers", minversion="5.23")
pytestmark = pytest.mark.filterwarnings("ignore")

from penstock.actors.policy.model import ancestors_of  # noqa: E402
from penstock.actors.trainer.ranks.hf import attention  # noqa: E402
from penstock.actors.trainer.ranks.hf.attention import (  # noqa: E402
    PackedLayout,
    block_mask,
    packed_attention,
    watch,
)

HEADS, GROUPS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")
TREE = ((30, 9, 14, 5, 21), (-1, 0, 0, 2, -1))


def layout_of(lengths, parents=None):
    return PackedLayout(tuple(lengths), ancestors_of(len(lengths), parents), CPU)


def drawn(num_tokens, seed=0, width=WIDTH):
    torch.manual_seed(seed)
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, width))
    return [torch.randn(1, h, num_tokens, w, requires_grad=True) for h, w in shapes]


def sees(layout, window):
    """Bool [T, T], pair by pair."""
    piece = [i for i, n in enumerate(layout.lengths) for _ in range(n)]
    position = layout.positions.tolist()
    size = len(piece)
    mask = torch.zeros(size, size, dtype=torch.bool)
    for query in range(size):
        for key in range(query + 1):
            is_before = piece[key] in (*layout.chains[piece[query]], piece[query])
            is_near = not window or position[query] - position[key] < window
            mask[query, key] = is_before and is_near
    return mask


def dense(query, key, value, layout, *, scale=None, window=None, softcap=None, sinks=None):
    key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
    logits = query @ key.transpose(2, 3) * (scale or WIDTH**-0.5)
    if softcap:
        logits = (logits / softcap).tanh() * softcap
    logits = logits.masked_fill(~sees(layout, window), -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(-1, -1, logits.shape[2], 1)
        logits = torch.cat((logits, column), -1)
    return (logits.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def packed(query, key, value, layout, *, scale=None, window=None, softcap=None, sinks=None):
    module = torch.nn.Identity()
    watch(module).current = layout
    given = {"scaling": scale, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    return packed_attention(module, query, key, value, None, **given)[0]


def assert_same(layout, inputs, **scores):
    leaves = [*inputs, *([scores["sinks"]] if scores.get("sinks") is not None else [])]
    found = []
    for compute in (dense, packed):
        out = compute(*inputs, layout, **scores)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


KINDS = {
    "plain": {},
    "scaled": {"scale": 0.7},
    "window": {"window": 7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.1, -1.0, 2.0, 0.0], requires_grad=True)},
    "all": {"window": 11, "softcap": 3.0, "sinks": torch.ones(HEADS, requires_grad=True)},
}


@pytest.mark.parametrize("queries", [8, 512])
@pytest.mark.parametrize("scores", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tree", [((40, 33), None), TREE], ids=["flat", "tree"])
def test_pieces_give_what_all_pairs_give(tree, scores, queries, monkeypatch):
    monkeypatch.setattr(attention, "_QUERIES", queries)
    layout = layout_of(*tree)
    assert_same(layout, drawn(sum(tree[0])), **scores)


def test_values_of_another_width_are_taken():
    layout = layout_of(*TREE)
    assert_same(layout, drawn(sum(TREE[0]), width=5))


@st.composite
def trees(draw):
    count = draw(st.integers(1, 7))
    # A walk that visits each piece directly before those that continue it.
    parents, path = [], []
    for index in range(count):
        keep = draw(st.integers(0, len(path)))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(index)
    return draw(st.lists(st.integers(1, 90), min_size=count, max_size=count)), parents


@settings(max_examples=60)
@given(
    tree=trees(), window=st.one_of(st.none(), st.integers(1, 80)), tile=st.sampled_from([8, 128])
)
def test_tiles_say_what_pairs_say(tree, window, tile):
    """What FlexAttention skips nobody sees, and what it does not ask about everybody sees."""
    layout = layout_of(*tree)
    before, attention._TILE = attention._TILE, tile
    try:
        found = block_mask(layout, window)
    finally:
        attention._TILE = before
    size = sum(tree[0])
    index = torch.arange(size)
    asked = found.mask_mod(0, 0, index[:, None], index[None, :])
    expected = sees(layout, window)
    assert torch.equal(asked, expected)
    num_tiles = -(-size // tile)
    some, whole = (torch.zeros(num_tiles, num_tiles, dtype=torch.bool) for _ in range(2))
    for table, counts, indices in (
        (some, found.kv_num_blocks, found.kv_indices),
        (whole, found.full_kv_num_blocks, found.full_kv_indices),
    ):
        for row in range(num_tiles):
            table[row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
    wide = [
        t.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[:size, :size] for t in (some, whole)
    ]
    assert not (expected & ~(wide[0] | wide[1])).any()
    assert not (wide[1] & ~expected).any()
    assert not (some & whole).any()


@pytest.mark.parametrize("scores", KINDS.values(), ids=KINDS)
def test_flex_attention_gives_what_all_pairs_give(scores, monkeypatch):
    """Without its compiler, which needs a GPU here: the masks, the bound and the sinks."""
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    monkeypatch.setattr(attention, "_by_pieces", attention._flex)
    layout = layout_of((200, 9, 140, 5, 21), TREE[1])
    inputs = [each.detach() for each in drawn(375)]
    own = {name: each.detach() if name == "sinks" else each for name, each in scores.items()}
    with torch.no_grad():
        found, expected = packed(*inputs, layout, **own), dense(*inputs, layout, **own)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_walk_out_of_order_is_refused_where_the_order_matters():
    with pytest.raises(ValueError, match="parents: expected each piece directly before"):
        _ = layout_of((3, 3, 3), (-1, -1, 0)).ends


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that one tensor had."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor):
                self.num_elements = max(self.num_elements, each.numel())
        return out


@pytest.mark.parametrize("scores", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_no_tensor_grows_with_the_square_of_the_pack(scores):
    """Twice the sequences, twice the memory; all pairs would take four times as much."""
    found = []
    for num_sequences in (8, 16, 32):
        layout = layout_of([64] * num_sequences)
        inputs = drawn(64 * num_sequences)
        with Largest() as largest:
            packed(*inputs, layout, **scores).sum().backward()
        found.append(largest.num_elements)
        assert largest.num_elements < (64 * num_sequences) ** 2
    assert found[1] <= 2 * found[0]
    assert found[2] <= 2 * found[1]
