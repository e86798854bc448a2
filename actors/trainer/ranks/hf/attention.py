"""Attention over packed trees of sequences, without a mask over all pairs of packed tokens.

Registered once with transformers under `NAME`, for every architecture. Each pass has one layout
that all layers read. A piece attends to itself and to the pieces that it continues:

    CPU                                SDPA by pieces, by blocks of queries where a mask is needed
    CUDA, sequences that share nothing `torch.nn.attention.varlen`
    CUDA, else                         FlexAttention with a mask by blocks

Memory grows with the number of tokens and, for a piece that continues others, with its keys, never
with the square of the pack. Shapes: T packed tokens, H heads, D of a head; queries [H, T, D].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

NAME = "penstock"
_QUERIES = 512
"""Queries of one block whose mask, or scores, are in memory at once."""
_TILE = 128
"""Tokens of one tile of FlexAttention's mask."""


@dataclass(frozen=True)
class PackedLayout:
    """The pieces of a pack, and which pieces each one continues."""

    lengths: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    """Preceding pieces of each piece in its sequence, first to last."""
    device: torch.device

    @property
    def is_flat(self) -> bool:
        """Whether every piece is a whole sequence."""
        return not any(self.chains)

    @cached_property
    def pieces(self) -> list[slice]:
        """Tokens of each piece."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First position of each piece in its sequence, and the one after its last position."""
        starts = [sum(self.lengths[i] for i in chain) for chain in self.chains]
        return [(s, s + n) for s, n in zip(starts, self.lengths, strict=True)]

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, int64 [T] on the device."""
        parts = [torch.arange(*span) for span in self.spans]
        return torch.cat(parts).to(self.device)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """int32 [T + 1], where sequences of a flat pack begin, and the last ends."""
        return F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0)).to(self.device, torch.int32)

    @cached_property
    def ends(self) -> torch.Tensor:
        """For each token, one past the last token that attends to it, int64 [T] on the device.

        Raises:
            ValueError: A piece is not directly followed by all that continue it.

        """
        last = list(range(len(self.lengths)))
        for piece, chain in enumerate(self.chains):
            for before in chain:
                last[before] = piece
        num_after = [0] * len(last)
        for chain in self.chains:
            for before in chain:
                num_after[before] += 1
        if any(end - i != n for i, (end, n) in enumerate(zip(last, num_after, strict=True))):
            raise ValueError("parents: expected each piece directly before those that continue it")
        ends = torch.tensor([self.pieces[i].stop for i in last])
        return ends.repeat_interleave(torch.tensor(self.lengths)).to(self.device)

    @cached_property
    def block_masks(self) -> dict[int | None, BlockMask]:
        """Results of `block_mask`, by window."""
        return {}


class Scores(NamedTuple):
    """Modifications of the attention scores by an architecture."""

    scale: float | None
    window: int | None = None
    """Tokens that each token attends to, including itself."""
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """Attention sinks [H]: logits that take a share of the attention and contribute nothing."""

    @property
    def is_plain(self) -> bool:
        """Whether SDPA supports them."""
        return self.softcap is None and self.sinks is None


class Layouts:
    """The layout of the pass in progress, which the attention modules of one model share."""

    current: PackedLayout


def watch(model: nn.Module) -> Layouts:
    """Make the attention of a model read its layout from the returned object."""
    layouts = Layouts()
    for module in model.modules():
        module.__dict__["packed_layouts"] = layouts
    return layouts


@torch.compiler.disable
def packed_attention(  # noqa: PLR0913, PLR0917 - transformers' signature
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, as transformers calls it.

    Args:
        module: Attention module of the model passed to `watch`.
        query: [B, H, S, D]; its rows of S tokens are the layout's T tokens in order.
        key: [B, H', S, D], H a multiple of H'.
        value: [B, H', S, D'].
        attention_mask: None.
        scaling: Factor of the scores.
        sliding_window: Tokens that each token attends to.
        softcap: Bound on the scores, applied by tanh.
        s_aux: [H] sinks.

    Returns:
        [B, S, H, D'] and None.

    """
    assert attention_mask is None, "the layout says what each token sees"
    layout: PackedLayout = module.packed_layouts.current
    batch, _heads, row, width = query.shape
    q, k, v = (each.transpose(0, 1).flatten(1, 2) for each in (query, key, value))
    scores = Scores(scaling, sliding_window, softcap, s_aux)
    if q.shape[-1] != v.shape[-1] and (scores.is_plain or q.is_cuda):
        # Fused kernels require the same width for all three.
        v = F.pad(v, (0, width - v.shape[-1]))
    attend = _by_pieces if not q.is_cuda else _varlen if _is_varlen(layout, scores) else _flex
    out = attend(q, k, v, layout, scores)[..., : value.shape[-1]]
    return out.unflatten(1, (batch, row)).permute(1, 2, 0, 3).contiguous(), None


AttentionInterface.register(NAME, packed_attention)


def _by_pieces(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scores: Scores,
) -> torch.Tensor:
    repeats = query.shape[0] // key.shape[0]
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, 0) for each in (key, value))
    found = []
    for own, chain in zip(layout.pieces, layout.chains, strict=True):
        seen = [*(layout.pieces[i] for i in chain), own]
        keys, values = (
            torch.cat([each[:, part] for part in seen], 1) if chain else each[:, own]
            for each in (key, value)
        )
        found += _blocks(query[:, own], keys, values, scores)
    return torch.cat(found, 1)


def _blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> Iterator[torch.Tensor]:
    """Yield the attention of the last n of m tokens, block by block."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    first = num_keys - num_queries
    window = scores.window if scores.window and scores.window < num_keys else None
    if scores.is_plain and not first and window is None:
        yield _sdpa(query, key, value, None, scores.scale)
        return
    for start in range(0, num_queries, _QUERIES):
        stop = min(start + _QUERIES, num_queries)
        low = max(0, first + start - window + 1) if window else 0
        rows = torch.arange(first + start, first + stop).unsqueeze(1)
        columns = torch.arange(low, first + stop)
        mask = columns <= rows
        if window:
            mask &= columns > rows - window
        part = (query[:, start:stop], key[:, low : first + stop], value[:, low : first + stop])
        if scores.is_plain:
            yield _sdpa(*part, mask, scores.scale)
        else:  # Recomputed in the backward pass, so no block's scores are kept.
            yield checkpoint(_explicit, *part, mask, scores, use_reentrant=False)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    # With a batch dimension, since without one the CPU uses the path that stores all scores.
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], mask, is_causal=mask is None, scale=scale
    )[0]


def _explicit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scores: Scores
) -> torch.Tensor:
    scale = scores.scale or query.shape[-1] ** -0.5
    logits = query @ key.transpose(1, 2) * scale
    if scores.softcap is not None:
        logits = (logits / scores.softcap).tanh() * scores.softcap
    logits = logits.float().masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().reshape(-1, 1, 1).expand(-1, logits.shape[1], 1)
        logits = torch.cat((logits, sinks), -1)
    return logits.softmax(-1)[..., : key.shape[1]].to(value.dtype) @ value


def _is_varlen(layout: PackedLayout, scores: Scores) -> bool:
    return layout.is_flat and scores.is_plain


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scores: Scores,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max(layout.lengths)
    q, k, v = (each.transpose(0, 1).contiguous() for each in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        layout.bounds,
        layout.bounds,
        longest,
        longest,
        scale=scores.scale,
        window_size=((scores.window or 0) - 1, 0),
        enable_gqa=query.shape[0] != key.shape[0],
    )
    assert isinstance(out, torch.Tensor)
    return out.transpose(0, 1)


def _flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scores: Scores,
) -> torch.Tensor:
    cap = scores.softcap or 1.0

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return (score / cap).tanh() * cap

    out, lse = _compiled_flex()(
        query[None],
        key[None],
        value[None],
        score_mod=None if scores.softcap is None else capped,
        block_mask=block_mask(layout, scores.window),
        scale=scores.scale,
        enable_gqa=query.shape[0] != key.shape[0],
        return_lse=True,
    )
    if scores.sinks is not None:
        share = torch.sigmoid(lse - scores.sinks.float().reshape(1, -1, 1))
        out = out * share.unsqueeze(-1).to(out.dtype)
    return out[0]


@cache
def _compiled_flex() -> Callable[..., Any]:
    # Without a compiler, FlexAttention computes the scores of all pairs.
    return (
        torch.compile(flex_attention, dynamic=True) if torch.cuda.is_available() else flex_attention
    )


def block_mask(layout: PackedLayout, window: int | None) -> BlockMask:
    """Return which tiles of 128 x 128 tokens attend to each other, without a mask of all pairs."""
    if window in layout.block_masks:
        return layout.block_masks[window]
    ends, positions = layout.ends, layout.positions
    num_tokens = ends.numel()

    def sees(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        found = (key <= query) & (query < ends[key])
        return found & (positions[query] - positions[key] < window) if window else found

    num_tiles = -(-num_tokens // _TILE)
    pad = num_tiles * _TILE - num_tokens
    far, near = (F.pad(ends, (0, pad), value=v).view(-1, _TILE) for v in (0, num_tokens))
    tile = torch.arange(num_tiles, device=ends.device)
    is_before = tile[:, None] > tile
    is_some = (is_before & (far.amax(1) > tile[:, None] * _TILE)) | (tile[:, None] == tile)
    is_all = is_before & (near.amin(1) >= ((tile + 1) * _TILE).clamp(max=num_tokens)[:, None])
    if window:
        low, high = (F.pad(positions, (0, pad), value=v).view(-1, _TILE) for v in (1 << 40, -1))
        is_some &= low.amin(1)[:, None] - high.amax(1) < window
        is_all &= high.amax(1)[:, None] - low.amin(1) < window
    tables = [*_listed(is_some & ~is_all), *_listed(is_all)]
    made = BlockMask.from_kv_blocks(
        *tables, BLOCK_SIZE=_TILE, mask_mod=sees, seq_lengths=(num_tokens, num_tokens)
    )
    layout.block_masks[window] = made
    return made


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [N, N] -> number and indices of the tiles of each row, as FlexAttention expects them."""
    order = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(1).int()[None, None], order.int()[None, None]
