"""The arguments of `penstock agent`; what it does is imported when it runs."""

import argparse
from pathlib import Path
from typing import Any

from penstock.envs.harness import HARNESS_VERSIONS


def add_agent(commands: Any) -> None:
    """Register the command."""
    agent = commands.add_parser(
        "agent",
        help="let a model work on a checkout, with the harness of training",
        allow_abbrev=False,
    )
    agent.set_defaults(command="agent.command:run")
    agent.add_argument("instruction", help="the task, in words")
    agent.add_argument(
        "--repo", type=Path, default=Path(), help="the checkout (default: the current folder)"
    )
    agent.add_argument(
        "--run", default="latest", help="run whose gateway serves the model (default: %(default)s)"
    )
    agent.add_argument(
        "--url",
        default="",
        help="chat-completions endpoint to use instead, up to and including /v1",
    )
    agent.add_argument(
        "--key-file",
        type=Path,
        help="file with the bearer key of that endpoint (default: $PENSTOCK_AGENT_KEY)",
    )
    agent.add_argument("--model", default="policy", help="name of the model (default: %(default)s)")
    agent.add_argument("--turns", type=int, default=30, help="maximum turns (default: %(default)s)")
    text = "version of the tools that it is offered (default: the run's; needed with --url)"
    agent.add_argument("--harness", choices=HARNESS_VERSIONS, help=text)
    text = "shell command to run when the agent is done; whether it succeeds goes to the service"
    agent.add_argument("--tests", default="", metavar="COMMAND", help=text)
    text = "wait so long, then report how much of the change is still there"
    agent.add_argument("--kept-minutes", type=_minutes, default=0.0, metavar="N", help=text)
    text = "send feedback to --url too; a run's gateway always gets it"
    agent.add_argument("--feedback", action="store_true", help=text)
    agent.add_argument(
        "--tool-s",
        type=float,
        default=60.0,
        help="maximum seconds per tool call (default: %(default)s)",
    )
    agent.add_argument(
        "--output-bytes",
        type=int,
        default=16_384,
        help="maximum bytes per observation (default: %(default)s)",
    )
    agent.add_argument(
        "--embeddings", default="", metavar="URL", help="embeddings endpoint, for semantic search"
    )
    agent.add_argument(
        "--embeddings-model", default="policy", help="name of its model (default: %(default)s)"
    )
    agent.add_argument("--json", action="store_true", help="the last line is one JSON object")


def _minutes(text: str) -> float:
    """Return a number of minutes, up to a week."""
    minutes = float(text)
    if not 0 <= minutes <= 7 * 24 * 60:
        raise argparse.ArgumentTypeError(f"expected 0 to 10080 minutes, got {text}")
    return minutes
