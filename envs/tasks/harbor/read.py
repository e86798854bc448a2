"""Harbor folders, in: strictly, with the file and the field in every error.

A folder that Penstock wrote comes back as it was. A foreign one is graded by its own verifier. Its
Dockerfile is read: what `COPY` and `ADD` bring into the working directory is taken, and one that
does more needs an image (`envs/tasks/images.py`). What no machine has is refused by its field
(`fields.py`).

Source: Harbor's task format, schema 1.4 (harborframework.com/docs/tasks).
"""

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.envs.egress.rules import EgressRuleError, parse_rules
from penstock.envs.microvm.images.layers import pinned
from penstock.envs.needs import check_numbers
from penstock.envs.sandbox import NeedsRefused
from penstock.envs.tasks.harbor.fields import parse_fields
from penstock.envs.tasks.harbor.folder import (
    SETTINGS_BYTES_MAX,
    MalformedTaskError,
    TaskImage,
    TreeParts,
    read_text,
    read_tree,
    split_tree,
)
from penstock.envs.tasks.harbor.hidden import converted, is_foreign, read_hidden
from penstock.envs.tasks.harbor.schema import INTERNET, HarborFieldError, HarborFields
from penstock.envs.tasks.harbor.steps import check_paths, read_steps
from penstock.envs.tasks.harbor.write import START_FOLDER, TASK_FILE
from penstock.envs.tasks.images import DOCKERFILE, named_image, start_of
from penstock.envs.tasks.source import TaskCandidate, TaskOrigin
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.task import HiddenTests, Limits, MachineNeeds, Split, Task, TaskStep

ENVIRONMENT = "environment"
REFUSED_FILES = (
    "trajectory.json",
    "environment/docker-compose.yaml",
    "environment/docker-compose.yml",
    "environment/singularity-compose.yaml",
)
"""Of Harbor's layout: prior context of an agent, and environments of several services."""
_PLAIN = r"^[^\x00-\x1f\x7f]+\Z"
_TaskId = Annotated[str, msgspec.Meta(max_length=200, pattern=_PLAIN)]
_Name = Annotated[str, msgspec.Meta(max_length=64, pattern=_PLAIN)]


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How strangers' tasks are read."""

    egress_addresses: bool = False
    """Whether an allow-list may name addresses, private ones included."""
    isolation_min: str = ""
    """The least isolation class of a task with a verifier of its own; by default its host's."""
    internet: tuple[str, ...] = INTERNET
    """Rules that stand for the internet, where a task asks for it."""
    is_offline: bool = False
    """Whether a task that asks for a network is refused."""


DEFAULT_OPTIONS = ReadOptions()


def read_harbor(folder: Path, options: ReadOptions = DEFAULT_OPTIONS) -> TaskCandidate:
    """Read one task.

    Raises:
        MalformedTaskError: Parts are missing, do not parse, have a wrong type, are too large, lead
            out of the folder, or ask for what no machine has; it has all reasons.

    """
    settings = _settings(folder)
    own = settings.get("metadata", {}).get("penstock", {})
    if not isinstance(own, dict):
        raise MalformedTaskError(f"{folder / TASK_FILE}: metadata.penstock: expected a table")
    try:
        fields, unknown = parse_fields(settings)
    except HarborFieldError as error:
        reasons = [f"{folder / TASK_FILE}: {line}" for line in str(error).split("\n")]
        reasons += _refused_files(folder, [])
        # Without its fields a task is read as if it had none, to say what else is wrong with it.
        others = _Reasons(folder)
        with others.kept():
            _read(folder, HarborFields(), own, options, others)
        raise MalformedTaskError(*reasons, *others.all) from error
    reasons = _Reasons(folder)
    reasons.found += _refused_files(folder, [step.name for step in fields.steps or []])
    candidate = _read(folder, fields, own, options, reasons)
    reasons.check()
    kept = [f"{name}: kept, without effect" for name in unknown]
    limits = [] if "machine" in own else fields.adapted
    return msgspec.structs.replace(candidate, adapted=[*kept, *limits, *candidate.adapted])


class _Reasons:
    """Collects what is wrong with one task."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: list[str] = []
        self._images: list[str] = []
        self._image: TaskImage | None = None

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Note what is wrong, and go on."""
        try:
            yield
        except HarborFieldError as error:
            self.found.append(f"{self._folder / TASK_FILE}: {error}")
        except MalformedTaskError as error:
            (self._images if error.image else self.found).extend(error.reasons)
            self._image = self._image or error.image

    @property
    def all(self) -> list[str]:
        """Last what an image would mend."""
        return [*self.found, *self._images]

    def check(self) -> None:
        """Raise MalformedTaskError if anything is wrong."""
        if self.all:
            raise MalformedTaskError(*self.all, image=None if self.found else self._image)


def _read(
    folder: Path,
    fields: HarborFields,
    own: dict[str, Any],
    options: ReadOptions,
    reasons: _Reasons,
) -> TaskCandidate:
    """Read what the settings name; a part that is malformed is noted, and left out."""
    task_id: str = converted(
        folder, own.get("task_id", folder.name), _TaskId, "metadata.penstock.task_id"
    )
    category = converted(folder, own.get("category", "harbor"), _Name, "metadata.penstock.category")
    split = converted(folder, own.get("split", "train"), Split, "metadata.penstock.split")
    image, start, steps = "", TreeParts(), [TaskStep(instruction="")]
    with reasons.kept():
        image, start = _image_and_start(folder, fields, own)
    with reasons.kept():
        steps = read_steps(folder, fields)
    hidden = HiddenTests(task_id=task_id, files={}, argv=[])
    with reasons.kept():
        hidden = read_hidden(folder, task_id, fields)
    egress, needs, limits = list[str](), MachineNeeds(), Limits()
    with reasons.kept():
        egress = _egress(folder, fields, own, options)
        hidden = msgspec.structs.replace(hidden, egress=fields.verifier_egress(options.internet))
    with reasons.kept():
        least = options.isolation_min if is_foreign(folder, fields) else ""
        needs = _machine(folder, fields, own, least)
    with reasons.kept():
        limits = _limits(folder, fields, own)
    task = _with_start(
        Task(
            task_id=task_id,
            category=category,
            split=split,
            instruction=steps[0].instruction,
            files={},
            limits=limits,
            egress=egress,
            image=image,
            machine=needs,
            has_setup=steps[0].has_setup,
            steps=steps[1:],
        ),
        start,
        steps[0],
    )
    with reasons.kept():
        check_paths(folder, [task.contents, *(step.contents for step in steps[1:])])
    name = fields.task.name if fields.task else None
    origin = converted(
        folder,
        own.get(
            "origin",
            {
                "source": "harbor",
                "repository": name or fields.source or folder.name,
                "kind": "harbor",
            },
        ),
        TaskOrigin,
        "metadata.penstock.origin",
    )
    asks = egress and "egress" not in own and egress == list(options.internet)
    adapted = [f"network: the internet is {len(egress)} rules here"] if asks else []
    return TaskCandidate(task=task, hidden=hidden, origin=origin, adapted=adapted)


def _with_start(task: Task, start: TreeParts, first: TaskStep) -> Task:
    """Add what an agent starts with, over which the first step's files lie."""
    over = first.contents
    states = {one.path: one for one in start.states if one.name not in over}
    return msgspec.structs.replace(
        task,
        files={path: text for path, text in start.files.items() if path not in over} | first.files,
        binaries={path: data for path, data in start.binaries.items() if path not in over}
        | first.binaries,
        states=list((states | {one.path: one for one in first.states}).values()),
    )


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / TASK_FILE
    text = read_text(folder, TASK_FILE, bytes_max=SETTINGS_BYTES_MAX)
    try:
        settings = parse_toml(text, TASK_FILE)
    except CodecError as error:
        raise MalformedTaskError(f"{path}: {error}") from error
    version = settings.get("version", settings.get("schema_version"))
    if version is not None and (not isinstance(version, str) or not version.startswith("1.")):
        raise MalformedTaskError(f"{path}: version: expected '1.x', got {version!r}")
    for name in ("metadata", "verifier", "agent", "environment"):
        if not isinstance(settings.get(name, {}), dict):
            raise MalformedTaskError(f"{path}: {name}: expected a table")
    return settings


def _refused_files(folder: Path, steps: Sequence[str]) -> list[str]:
    """Return a reason for each file that asks for what no task here has."""
    text = "expected none: a task is one image and one machine, and begins with no context"
    names = [*REFUSED_FILES, *(f"steps/{step}/trajectory.json" for step in steps)]
    return [f"{folder / name}: {text}" for name in names if (folder / name).exists()]


def _egress(
    folder: Path, fields: HarborFields, own: dict[str, Any], options: ReadOptions
) -> list[str]:
    """Return the hosts that Penstock's own field names, else those of Harbor's network fields."""
    field = "metadata.penstock.egress"
    try:
        if "egress" in own:
            rules: list[str] = converted(folder, own["egress"], list[str], field)
        else:
            field, rules = "allowed_hosts", fields.egress(options.internet)
        parse_rules(rules, allows_addresses=options.egress_addresses)
    except EgressRuleError as error:
        raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {error}") from error
    if rules and options.is_offline:
        text = f"expected none, offline: it may reach {rules[0]}"
        raise MalformedTaskError(f"{folder / TASK_FILE}: network: {text}, {len(rules)} in all")
    return rules


def _image(folder: Path, fields: HarborFields, own: dict[str, Any]) -> str:
    """Return the image that Penstock's own field names, else the one that Harbor would pull."""
    image = fields.environment.docker_image
    if "image" in own:
        # Written here, perhaps on another machine: where it runs, its host knows its images.
        return pinned(converted(folder, own["image"], str, "metadata.penstock.image"))
    return named_image(image, f"{folder / TASK_FILE}: environment.docker_image") if image else ""


def _machine(
    folder: Path, fields: HarborFields, own: dict[str, Any], isolation_min: str
) -> MachineNeeds:
    """Return what Penstock's own field says, else what Harbor's fields of the environment do."""
    field, numbers = "metadata.penstock.machine", own.get("machine")
    if "machine" not in own:
        given = {} if "limits" in own else fields.machine
        isolation = {"isolation_min": isolation_min} if isolation_min else {}
        field, numbers = "environment", given | isolation
    needs: MachineNeeds = converted(folder, numbers, MachineNeeds, field)
    try:
        check_numbers(needs)
    except NeedsRefused as error:
        raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {error}") from error
    return needs


def _limits(folder: Path, fields: HarborFields, own: dict[str, Any]) -> Limits:
    if "limits" in own:
        return converted(folder, own["limits"], Limits, "metadata.penstock.limits")
    num_steps, one = len(fields.steps or [0]), Limits()
    return Limits(
        wall_s_max=fields.agent_s,
        num_turns_max=num_steps * one.num_turns_max,
        num_tokens_max=num_steps * one.num_tokens_max,
    )


def _image_and_start(
    folder: Path, fields: HarborFields, own: dict[str, Any]
) -> tuple[str, TreeParts]:
    """Return the image, and the files that an agent starts with."""
    image = _image(folder, fields, own)
    if not (folder / ENVIRONMENT).is_dir():
        return image, TreeParts()
    has_dockerfile = (folder / ENVIRONMENT / DOCKERFILE).exists()
    if (folder / START_FOLDER).is_dir() and not has_dockerfile:
        return image, split_tree(read_tree(folder, START_FOLDER))
    context = read_tree(folder, ENVIRONMENT)
    image, start = start_of(folder, folder / ENVIRONMENT, context, image=image)
    return image, split_tree(start)
