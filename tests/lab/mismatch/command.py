"""`python -m tests.lab mismatch`: `penstock mismatch` on fresh weights or with expert formats."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import torch
from tests.lab.mismatch.formats import compare_formats, format_line
from tests.lab.mismatch.fresh import fresh_subject

from penstock.actors.trainer.midtraining.corpus import decode_corpus
from penstock.infra.commands.parsers import add_run_name
from penstock.infra.config.file import load_config
from penstock.infra.mismatch.formatting import format_report, short_report
from penstock.infra.mismatch.report import report
from penstock.infra.mismatch.subject import MismatchSubject, load_subject
from penstock.infra.output import print_result
from penstock.infra.run.runs import find_run
from penstock.messages.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mismatch`."""
    add_run_name(parser)
    parser.add_argument("--config", type=Path, help="use fresh weights instead of a run's")
    text = "tokens to sample, approximately (default: 10000)"
    parser.add_argument("--tokens", type=int, default=10_000, help=text)
    text = "also train the run's corpus for this many tokens in each expert format"
    parser.add_argument("--format-tokens", type=int, default=0, help=text)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 0 only if exact mode's mismatch is zero.

    With `--json` the last line is the short object, the line before it everything.
    """
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens: expected 1 or more, got {arguments.tokens}")
    if arguments.format_tokens and arguments.config:
        raise ConfigError("--format-tokens: expected a run, whose corpus it takes, not --config")
    torch.set_num_threads(1)
    if arguments.config:
        subject = fresh_subject(arguments.config)
    else:
        subject = asyncio.run(load_subject(find_run(arguments.run, arguments.runs_dir)))
    figures = report(subject, arguments.tokens)
    if arguments.format_tokens:
        figures["formats"] = asyncio.run(_formats(arguments, subject))
    if arguments.json:
        for each in (figures, short_report(figures)):
            print_result(each, as_json=True)
    else:
        lines = [format_report(figures), *map(format_line, figures.get("formats", []))]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0 if figures["exact"]["logprob_abs_diff_max"] == 0.0 else 1


async def _formats(arguments: argparse.Namespace, subject: MismatchSubject) -> list[dict[str, Any]]:
    """Compare the experts' formats on a run's corpus; printed one by one as they finish."""
    run = find_run(arguments.run, arguments.runs_dir)
    config = load_config(run.config)
    midtrain, store = config.trainer.midtrain, run.store()
    rows: list[dict[str, Any]] = []
    for row in compare_formats(
        config.policy,
        midtrain,
        decode_corpus(await store.get(midtrain.tokens_key)),
        decode_corpus(await store.get(midtrain.heldout_key)),
        num_tokens=arguments.format_tokens,
        prompts=subject.prompts,
    ):
        sys.stderr.write(format_line(row) + "\n")
        rows.append(row)
    return rows
