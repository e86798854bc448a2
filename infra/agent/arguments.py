"""The arguments of `penstock agent|chat`; what they do is imported when they run."""

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
    _add_endpoint(agent)
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


def add_chat(commands: Any) -> None:
    """Register the command."""
    chat = commands.add_parser(
        "chat", help="talk to a run's policy, or a model's folder, which uses its tools on a folder"
    )
    chat.set_defaults(command="agent.chat:chat_command")
    text = "id or path of a run (default: the newest), or a folder in Hugging Face's layout"
    chat.add_argument("target", nargs="?", default="latest", metavar="RUN|CHECKPOINT", help=text)
    text = "folder to work on, as a copy (default: a held-out task of the run)"
    chat.add_argument("--workspace", type=Path, metavar="DIR", help=text)
    text = "let it change the files of --workspace themselves"
    chat.add_argument("--in-place", action="store_true", help=text)
    _add_endpoint(chat)


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    """Let a command take the model that it talks to, and how long."""
    text = "chat-completions endpoint to use instead, up to and including /v1"
    parser.add_argument("--url", default="", help=text)
    text = "file with the bearer key of that endpoint (default: $PENSTOCK_AGENT_KEY)"
    parser.add_argument("--key-file", type=Path, help=text)
    text = "host off this machine that may get key and texts over http://"
    parser.add_argument(
        "--allow-plain-text", action="append", default=[], metavar="HOST", help=text
    )
    text = "name of the model (default: %(default)s)"
    parser.add_argument("--model", default="policy", help=text)
    text = "version of the tools that it is offered (default: the run's; needed with --url)"
    parser.add_argument("--harness", choices=HARNESS_VERSIONS, help=text)
    text = "maximum turns for one instruction (default: %(default)s)"
    parser.add_argument("--turns", type=int, default=30, help=text)


def _minutes(text: str) -> float:
    """Return a number of minutes, up to a week."""
    minutes = float(text)
    if not 0 <= minutes <= 7 * 24 * 60:
        raise argparse.ArgumentTypeError(f"expected 0 to 10080 minutes, got {text}")
    return minutes
