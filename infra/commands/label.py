"""`penstock label RUN EPISODE good|bad|SCORE|none`: stores a person's label of an episode."""

import argparse
import getpass
import secrets

import msgspec

from penstock.infra.commands.show import fold_episodes, whole_id
from penstock.infra.output import print_result
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import open_log
from penstock.messages.bus import Bus
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.rollout import RolloutFinished
from penstock.messages.signals.episode_labels import EpisodeLabeled

WORDS: dict[str, float | None] = {"good": 1.0, "bad": 0.0, "none": None}


async def label_command(arguments: argparse.Namespace) -> int:
    """Store a label; the latest of each labeler counts."""
    value = read_value(arguments.value)
    run = await reached_run(arguments)
    async with open_log(run, "label") as bus:
        rollout_id = whole_id(arguments.episode, await fold_episodes(bus))
        labeler = arguments.by or getpass.getuser()
        event = await add_label(bus, rollout_id, labeler, value, arguments.comment)
    print_result(msgspec.to_builtins(event), as_json=arguments.json)
    return 0


def read_value(text: str) -> float | None:
    """Read a label.

    Raises:
        ConfigError: The text is neither one of the words nor a number.

    """
    try:
        return WORDS[text] if text in WORDS else float(text)
    except ValueError as error:
        choices = ", ".join(WORDS)
        raise ConfigError(f"label: expected {choices} or a score, 0 to 1, got {text!r}") from error


async def add_label(
    bus: Bus, rollout_id: str, labeler: str, value: float | None, comment: str
) -> EpisodeLabeled:
    """Store a label of a finished episode.

    Raises:
        NotFoundError: The log has no finished episode of that id.
        ConfigError: A field is out of bounds; the text names it.

    """
    finished = await bus.last(RolloutFinished, rollout_id)
    if finished is None or not isinstance(finished.event, RolloutFinished):
        raise NotFoundError(f"episode {rollout_id}: the log has no finished episode of that id")
    # Names are shown on terminals.
    if not labeler.isprintable():
        raise ConfigError(f"label: --by: expected printable text, got {labeler!r}")
    fields = {
        "type": EpisodeLabeled.__name__,
        "rollout_id": rollout_id,
        "group_id": finished.event.group_id,
        "label_id": secrets.token_hex(8),
        "labeler": labeler,
        "value": value,
        "comment": comment,
    }
    try:
        event = msgspec.convert(fields, EpisodeLabeled)
    except msgspec.ValidationError as error:
        raise ConfigError(f"label: {error}") from error
    await bus.publish([event])
    return event
