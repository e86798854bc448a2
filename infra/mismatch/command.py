"""`penstock mismatch`: compares trainer and sampler with each remedy and with all."""

import argparse
import asyncio
import sys

import torch

from penstock.infra.mismatch.formatting import format_report, short_report
from penstock.infra.mismatch.report import report
from penstock.infra.mismatch.subject import load_subject
from penstock.infra.output import print_result, write_to
from penstock.infra.run.runs import find_run
from penstock.messages.errors import ConfigError


def mismatch_command(arguments: argparse.Namespace) -> int:
    """Measure and print; return 0 only if the mismatch in exact mode is zero.

    With `--json`, the last line is the short report and the line before it the full one.
    """
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens: expected 1 or more, got {arguments.tokens}")
    # Sums over several threads may have another order in each run.
    torch.set_num_threads(1)
    subject = asyncio.run(load_subject(find_run(arguments.run, arguments.runs_dir)))
    found = report(subject, arguments.tokens)
    if arguments.json:
        for each in (found, short_report(found)):
            print_result(each, as_json=True)
    else:
        write_to(sys.stdout, format_report(found) + "\n")
    return 0 if found["exact"]["logprob_abs_diff_max"] == 0.0 else 1
