"""The delta codecs and their public peers, in one run: `python -m tests.lab weights`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from tests.lab.bench.codecs.contestants import PEER_FORMATS, PEER_HINT, peer_is_there
from tests.lab.bench.codecs.measure import PairFigures, measure
from tests.lab.bench.codecs.pairs import Pair, read_pair, trained_pairs
from tests.lab.bench.codecs.report import (
    Bar,
    bars,
    bars_text,
    incompressible_bar,
    scaling_text,
    table,
)
from tests.lab.bench.codecs.scaling import shard_scaling, thread_scaling

from penstock.messages.errors import ConfigError

MAIN_PAIR = "3e-06"
"""The learning rate whose figures stand at the top of the result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `weights`."""
    parser.add_argument("--base", type=Path, help="a checkpoint, instead of training one")
    parser.add_argument("--next", type=Path, help="the checkpoint after it")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the codecs on the given pair, or on trained ones.

    Raises:
        ConfigError: Only one checkpoint of the pair is given.

    """
    if (arguments.base is None) != (arguments.next is None):
        raise ConfigError("weights: --base and --next go together")
    return bench_weights(arguments.base, arguments.next)


def bench_weights(base: Path | None = None, target: Path | None = None) -> dict[str, Any]:
    """Measure ratio and speed of the codecs; the readable report goes to standard error.

    Args:
        base: a checkpoint; without it pairs are trained.
        target: the checkpoint after it.

    Returns:
        `codecs`, `changed_fraction`, `entropy_bound_ratio`, `num_bytes` of the pair (of those that
        are trained, `MAIN_PAIR`); `pairs`, all of them by label; `threads` and `shards`, size and
        speed of the ladder by their number; `bars`, each with whether it is met; `missing`, peers
        to install.

    Raises:
        ConfigError: two checkpoints without a common tensor.

    """
    pairs = _pairs(base, target)
    torch.set_num_threads(1)
    figures: dict[str, PairFigures] = {}
    found: list[Bar] = []
    for label, pair in pairs.items():
        figures[label] = measure(pair)
        found += bars(label, figures[label])
        _say(table(label, figures[label]))
    main = MAIN_PAIR if MAIN_PAIR in pairs else next(iter(pairs))
    scaling = {
        "threads": msgspec.to_builtins(thread_scaling(pairs[main])),
        "shards": msgspec.to_builtins(shard_scaling(pairs[main])),
    }
    found.append(incompressible_bar())
    missing = {} if peer_is_there() else dict.fromkeys(PEER_FORMATS, PEER_HINT)
    _say(scaling_text(scaling))
    _say(bars_text(found))
    for peer, hint in missing.items():
        _say(f"{peer} was not measured: {hint}")
    return msgspec.to_builtins(figures[main]) | {
        "pair": main,
        "pairs": msgspec.to_builtins(figures),
        **scaling,
        "bars": [dict(zip(("what", "value", "bar", "met"), bar, strict=True)) for bar in found],
        "missing": missing,
    }


def _pairs(base: Path | None, target: Path | None) -> dict[str, Pair]:
    if base is not None and target is not None:
        return {f"{base.name} -> {target.name}": read_pair(base, target)}
    return {f"{rate:g}": pair for rate, pair in trained_pairs().items()}


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
