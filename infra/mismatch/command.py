"""`penstock mismatch`: trainer against sampler, with every remedy alone and together."""

import argparse
import asyncio
import sys
from typing import Any

import torch

from penstock.actors.trainer.midtraining.corpus import decode_corpus
from penstock.infra.config.file import load_config
from penstock.infra.mismatch.formats import compare_formats
from penstock.infra.mismatch.formatting import format_line, format_report, short_report
from penstock.infra.mismatch.report import report
from penstock.infra.mismatch.subject import MismatchSubject, load_subject
from penstock.infra.output import print_result
from penstock.infra.run.runs import find_run
from penstock.messages.errors import ConfigError


def mismatch_command(arguments: argparse.Namespace) -> int:
    """Measure and print; return 0 only if exact mode's mismatch is zero.

    With `--json` the last line is the short object, the line before it everything.
    """
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens: expected 1 or more, got {arguments.tokens}")
    torch.set_num_threads(1)
    subject = asyncio.run(load_subject(arguments))
    figures = report(subject, arguments.tokens)
    if arguments.format_tokens:
        figures["formats"] = asyncio.run(_formats(arguments, subject))
    if arguments.json:
        for each in (figures, short_report(figures)):
            print_result(each, as_json=True)
    else:
        sys.stdout.write(format_report(figures) + "\n")
    return 0 if figures["exact"]["logprob_abs_diff_max"] == 0.0 else 1


async def _formats(arguments: argparse.Namespace, subject: MismatchSubject) -> list[dict[str, Any]]:
    """Compare the experts' formats on a run's corpus; printed one by one as they finish.

    Raises:
        ConfigError: There is no run.

    """
    if arguments.config:
        raise ConfigError("--format-tokens: expected a run, whose corpus it takes, not --config")
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
