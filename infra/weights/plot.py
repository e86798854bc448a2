"""An inspection as one picture: SVG, without any library."""

from html import escape

from penstock.infra.weights.files.paths import printable
from penstock.infra.weights.inspection import Inspection, Share

_CELL_PX = 18
_LABEL_PX = 330
_WIDTH_MIN_PX = 720
_BAR_PX = 120
_WITH_BASE = ("equal", "changed", "reshaped")
_TEXT = 'font-family="system-ui, sans-serif" font-size="12" fill="#222"'
_LIGHT, _DARK = (235, 243, 250), (8, 48, 107)


def draw(found: Inspection) -> str:
    """Draw the changed share by kind of tensor and layer, and by base exponent."""
    heat, heat_width, heat_height = _heatmap(found)
    bars, bars_width, bars_height = _exponents(found)
    width = max(_WIDTH_MIN_PX, heat_width, bars_width) + 20
    height = heat_height + bars_height + 70
    title = (
        f"{found.num_bytes:,} bytes for {found.target_bytes:,}"
        f" ({found.target_bytes / found.num_bytes:.1f}x smaller)"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="10" y="24" {_TEXT} font-weight="bold">{title}</text>'
        f'<g transform="translate(10 50)">{heat}</g>'
        f'<g transform="translate(10 {60 + heat_height})">{bars}</g></svg>\n'
    )


def _heatmap(found: Inspection) -> tuple[str, int, int]:
    """Draw one row per kind of tensor, one column per layer; return it with its size in pixels."""
    cells = found.grouped(
        lambda t: f"{t.kind}\n{t.layer or ''}" if t.status in _WITH_BASE else None
    )
    kinds = sorted({label.rpartition("\n")[0] for label in cells})
    layers = sorted({label.rpartition("\n")[2] for label in cells}, key=lambda n: (len(n), n))
    highest = max((share.fraction for share in cells.values()), default=0.0) or 1.0
    parts = [_text(0, 0, f"Changed share by kind and layer (darkest: {highest:.2%})")]
    for x, layer in enumerate(layers):
        if x % max(1, len(layers) // 16) == 0:
            parts.append(_text(_LABEL_PX + x * _CELL_PX, 18, layer or "–"))
    for y, kind in enumerate(kinds):
        parts.append(_text(0, 24 + (y + 0.7) * _CELL_PX, kind[-48:]))
        for x, layer in enumerate(layers):
            share = cells.get(f"{kind}\n{layer}")
            if share is not None:
                left, top = _LABEL_PX + x * _CELL_PX, 24 + y * _CELL_PX
                label = f"{kind} {layer}: {share.fraction:.3%}"
                color = _color(share.fraction / highest)
                parts.append(_rect(left, top, (_CELL_PX - 1, _CELL_PX - 1), color, label))
    return "".join(parts), _LABEL_PX + len(layers) * _CELL_PX, 40 + len(kinds) * _CELL_PX


def _exponents(found: Inspection) -> tuple[str, int, int]:
    """Draw bars of the changed share by exponent, or of what is known without the base."""
    charts = [
        _bars(f"Changed share by base exponent, {dtype}", _labeled(shares))
        for dtype, shares in found.exponents.items()
    ]
    for dtype, counts in () if charts else found.exponent_classes.items():
        total = sum(counts.values())
        shares = {first: Share(total, n) for first, n in counts.items()}
        title = f"Share of all changes by class of base exponents (from), {dtype}"
        charts.append(_bars(title, _labeled(shares)))
    parts: list[str] = []
    height = 0
    for chart, _ in charts:
        parts.append(f'<g transform="translate(0 {height})">{chart}</g>')
        height += _BAR_PX + 60
    return "".join(parts), max((width for _, width in charts), default=0), height


def _labeled(shares: dict[int, Share]) -> list[tuple[str, float]]:
    return [(str(label), share.fraction) for label, share in sorted(shares.items())]


def _bars(title: str, values: list[tuple[str, float]]) -> tuple[str, int]:
    highest = max(value for _, value in values) or 1.0
    parts = [_text(0, 0, f"{title} (highest: {highest:.2%})")]
    step = max(2, len(values) // 20)
    for number, (label, value) in enumerate(values):
        height = round(_BAR_PX * value / highest, 1)
        size = (_CELL_PX - 3, height)
        left = number * _CELL_PX
        parts.append(_rect(left, 12 + _BAR_PX - height, size, "#2171b5", f"{label}: {value:.3%}"))
        if number % step == 0:
            parts.append(_text(left, _BAR_PX + 28, label))
    baseline = _rect(0, 12 + _BAR_PX, (len(values) * _CELL_PX, 1), "#888", "0")
    return "".join(parts) + baseline, len(values) * _CELL_PX


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y:.1f}" {_TEXT}>{escape(printable(text))}</text>'


def _rect(x: float, y: float, size: tuple[float, float], color: str, label: str) -> str:
    return (
        f'<rect x="{x}" y="{y:.1f}" width="{size[0]}" height="{size[1]}" fill="{color}">'
        f"<title>{escape(printable(label))}</title></rect>"
    )


def _color(share: float) -> str:
    red, green, blue = (
        round(low + (high - low) * share) for low, high in zip(_LIGHT, _DARK, strict=True)
    )
    return f"#{red:02x}{green:02x}{blue:02x}"
