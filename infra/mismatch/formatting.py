"""Formats the results of `penstock mismatch`: lines for people, and the short report."""

from typing import Any

from penstock.infra.mismatch.report import MODES

_SHORT = ("tokens", "kl_k1", "kl_k3", "logprob_abs_diff_max")


def short_report(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return four metrics per mode, for scripts."""
    return {mode: {name: found[mode][name] for name in _SHORT} for mode in MODES}


def format_report(found: dict[str, Any]) -> str:
    """Return a report as lines."""
    layers = len(found["off"]["flips_per_layer"])
    lines = [
        f"{found['source']}: {found['exact']['tokens']} tokens, "
        f"{found['cached_tokens']} more from the prefix cache",
        f"{'':40}{'k1':>11}{'k3':>11}{'k3 left':>9}{'max':>10}{'p99':>10}{'r>2':>8}{'train':>7}"
        f"  flips in % of slots, layers 0 to {layers - 1}",
    ]
    lines += [_line(mode, found[mode]) for mode in MODES]
    for row in found["remedies"]:
        remedies = [name for name in ("fp32_gate", "replay") if row[name]]
        lines.append(_line(f"{row['kernels']}: {'+'.join(remedies) or 'none'}", row))
    for mode in MODES[1:]:
        lines.append(f"{mode}: first difference: {_place(found[mode]['first_layer'])}")
    routes = found["routes"]
    lines.append(
        f"routes: {routes['sealed']:.1f} bytes per token sealed, {routes['raw']:.1f} in the "
        f"engine, which keeps {routes['engine_cache'] / 1e6:.1f} MB of them"
    )
    lines += [_recording(*each) for each in found["recording"]["step"].items()]
    return "\n".join(lines)


def _line(name: str, row: dict[str, Any]) -> str:
    flips = " ".join(f"{100 * share:.2f}" for share in row["flips_per_layer"])
    price = f"{row['train_ratio']:.2f}x" if "train_ratio" in row else ""
    return (
        f"{name:40}{row['kl_k1']:11.2e}{row['kl_k3']:11.2e}{1.0 - row['kl_removed']:9.1e}"
        f"{row['logprob_abs_diff_max']:10.1e}{row['logprob_abs_diff_p99']:10.1e}"
        f"{row['ratio_above_2']:8.5f}{price:>7}  {flips}"
    )


def _place(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    return (
        f"layer {found['layer']}, token {found['token']}, unit {found['unit']}, by "
        f"{found['abs_diff']:.1e} (largest of the layer {found['abs_diff_max']:.1e})"
    )


def _recording(batch: str, row: dict[str, float]) -> str:
    return (
        f"decoding {batch} rows: recording routes takes {row['ratio']:.4f}x "
        f"({row['ratio_low']:.4f} to {row['ratio_high']:.4f}) the time"
    )
