"""What was measured, in words, against the bars."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.lab.bench.codecs.measure import CodecFigures, PairFigures

from penstock.kernels.delta import Dtype, encode

CHANGED_MAX = 0.08
"""The bars on size against peers hold up to this changed share."""
_SIZE_BARS = {"arc_v2": 0.40, "arc_v3": 0.60}
_SPEED_BARS = {"class_gap_ulp": (1.0, 1.0), "gap_ulp": (1.5, 3.5)}
_BOUND_SHARE_MIN, _BOUND_SHARE_STRETCH = 0.85, 0.95
_RAW_EXCESS_MAX = 1.001
Bar = tuple[str, float, str, bool]
"""Name, measured figure, bar, and whether it is met."""


def bars(label: str, figures: PairFigures) -> Iterator[Bar]:
    """Compare the figures of one pair with the bars."""
    codecs = figures.codecs
    ladder = codecs["ladder"]
    for peer, bar in _SIZE_BARS.items():
        if peer in codecs and figures.changed_fraction <= CHANGED_MAX:
            share = codecs[peer].ratio / ladder.ratio
            yield f"{label}: size over {peer}'s", share, f"<= {bar}", share <= bar
    share = ladder.ratio / figures.entropy_bound_ratio
    for bar in (_BOUND_SHARE_MIN, _BOUND_SHARE_STRETCH):
        yield f"{label}: share of the entropy bound", share, f">= {bar}", share >= bar
    for name, (encode_bar, decode_bar) in _SPEED_BARS.items():
        if name in codecs:
            speed = codecs[name].encode_gb_s
            yield f"{label}: {name} encode GB/s", speed, f">= {encode_bar}", speed >= encode_bar
            speed = codecs[name].decode_gb_s
            yield f"{label}: {name} decode GB/s", speed, f">= {decode_bar}", speed >= decode_bar
    is_exact = all(codec.bit_exact for codec in codecs.values())
    yield f"{label}: bit-exact", float(is_exact), "all", is_exact


def incompressible_bar() -> Bar:
    """Encode random bits against random bits."""
    rng = np.random.default_rng(0)
    base, target = (rng.integers(0, 1 << 16, 1 << 20, np.uint16) for _ in range(2))
    share = len(encode(base, target, Dtype.BF16)) / target.nbytes
    return "random bits: size over raw", share, f"<= {_RAW_EXCESS_MAX}", share <= _RAW_EXCESS_MAX


def table(label: str, figures: PairFigures) -> str:
    """Return the codecs of one pair as text."""
    lines = [
        f"{label}: {figures.num_bytes / 1e6:.1f} MB, {figures.changed_fraction:.3%} changed,"
        f" entropy bound {figures.entropy_bound_ratio:.1f}",
        f"  {'codec':<14}{'ratio':>9}{'encode GB/s':>13}{'decode GB/s':>13}  exact",
    ]
    best_first = sorted(figures.codecs.items(), key=lambda item: -item[1].ratio)
    return "\n".join(lines + [_line(name, codec) for name, codec in best_first])


def bars_text(found: list[Bar]) -> str:
    """Return the bars as text."""
    return "\n".join(
        f"  {'met   ' if met else 'MISSED'} {what}: {value:.3g} (bar {bar})"
        for what, value, bar, met in found
    )


def scaling_text(scaling: dict[str, dict[str, Any]]) -> str:
    """Return the ladder by number of threads and of shards as text."""
    return "\n".join(
        f"  {number:>2} {what}: ratio {one['ratio']:.2f}, encode {one['encode_gb_s']:.2f} GB/s,"
        f" decode {one['decode_gb_s']:.2f} GB/s by wall clock"
        for what, cases in scaling.items()
        for number, one in cases.items()
    )


def _line(name: str, codec: CodecFigures) -> str:
    speeds = f"{codec.encode_gb_s:>13.3f}{codec.decode_gb_s:>13.3f}"
    return f"  {name:<14}{codec.ratio:>9.2f}{speeds}  {'yes' if codec.bit_exact else 'NO'}"
