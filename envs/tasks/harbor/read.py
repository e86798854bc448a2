"""Harbor folders, in: strictly, with the file and the field in every error.

A folder that Penstock wrote comes back as it was. A foreign one is graded by its own verifier. Its
Dockerfile is not built: what `COPY` and `ADD` bring into the working directory is taken; all else
comes from an image layer, which the task names as its `docker_image`. A Dockerfile that does more
is refused where there is no layer, by its instruction; so are fields (`fields.py`).

Source: Harbor's task format, schema 1.4 (harborframework.com/docs/tasks).
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.envs.egress.rules import EgressRuleError, parse_rules
from penstock.envs.microvm.images.layers import pinned
from penstock.envs.needs import check_numbers
from penstock.envs.sandbox import NeedsRefused
from penstock.envs.tasks.dockerfile import DockerfileError, check_instructions, start_files
from penstock.envs.tasks.harbor.fields import parse_fields
from penstock.envs.tasks.harbor.folder import (
    SETTINGS_BYTES_MAX,
    MalformedTaskError,
    Tree,
    read_text,
    read_tree,
    split_tree,
)
from penstock.envs.tasks.harbor.hidden import converted, is_foreign, read_hidden
from penstock.envs.tasks.harbor.schema import HarborFieldError, HarborFields
from penstock.envs.tasks.harbor.steps import check_paths, read_steps
from penstock.envs.tasks.harbor.write import START_FOLDER, TASK_FILE
from penstock.envs.tasks.source import TaskCandidate, TaskOrigin
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.task import Limits, MachineNeeds, Split, Task

ENVIRONMENT, DOCKERFILE = "environment", "Dockerfile"
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


def read_harbor(
    folder: Path, *, egress_addresses: bool = False, isolation_min: str = ""
) -> TaskCandidate:
    """Read one task.

    Args:
        folder: Of the task.
        egress_addresses: Whether its allow-list may name addresses, private ones included.
        isolation_min: The least isolation class of a stranger's task, which has a verifier of its
            own; by default what its host gives.

    Raises:
        MalformedTaskError: A part is missing, does not parse, has a wrong type, is too large, or
            leads out of the folder, or asks for what no machine has.

    """
    try:
        return _read(folder, egress_addresses, isolation_min)
    except HarborFieldError as error:
        raise MalformedTaskError(f"{folder / TASK_FILE}: {error}") from error


def _read(folder: Path, egress_addresses: bool, isolation_min: str) -> TaskCandidate:
    settings = _settings(folder)
    own = settings.get("metadata", {}).get("penstock", {})
    if not isinstance(own, dict):
        raise MalformedTaskError(f"{folder / TASK_FILE}: metadata.penstock: expected a table")
    task_id: str = converted(
        folder, own.get("task_id", folder.name), _TaskId, "metadata.penstock.task_id"
    )
    category = converted(folder, own.get("category", "harbor"), _Name, "metadata.penstock.category")
    fields = _fields(folder, settings)
    image = _image(folder, fields, own)
    first, *later = read_steps(folder, fields)
    start = split_tree(_start(folder, has_image=bool(image)))
    first_files = first.files | first.binaries
    files = {path: text for path, text in start.files.items() if path not in first_files}
    binaries = {path: data for path, data in start.binaries.items() if path not in first_files}
    started = {one.path: one for one in start.states if one.name not in first_files}
    files, binaries = files | first.files, binaries | first.binaries
    check_paths(folder, [{**files, **binaries}, *(step.contents for step in later)])
    task = Task(
        task_id=task_id,
        category=category,
        split=converted(folder, own.get("split", "train"), Split, "metadata.penstock.split"),
        instruction=first.instruction,
        files=files,
        binaries=binaries,
        limits=_limits(folder, fields, own),
        egress=_egress(folder, fields, own, allows_addresses=egress_addresses),
        image=image,
        machine=_machine(folder, fields, own, isolation_min if is_foreign(folder, fields) else ""),
        states=list((started | {one.path: one for one in first.states}).values()),
        has_setup=first.has_setup,
        steps=later,
    )
    hidden = read_hidden(folder, task_id, fields)
    repository = fields.task.name if fields.task else fields.source or folder.name
    origin = converted(
        folder,
        own.get("origin", {"source": "harbor", "repository": repository, "kind": "harbor"}),
        TaskOrigin,
        "metadata.penstock.origin",
    )
    return TaskCandidate(task=task, hidden=hidden, origin=origin)


def read_harbor_set(
    root: Path, *, egress_addresses: bool = False, isolation_min: str = ""
) -> list[TaskCandidate]:
    """Read every task folder below a root, by name.

    Args:
        root: Holds the folders.
        egress_addresses: See `read_harbor`.
        isolation_min: As there.

    Raises:
        MalformedTaskError: One of them is malformed, two have one id, or there is none.

    """
    folders = sorted(path.parent for path in root.glob(f"*/{TASK_FILE}"))
    if not folders:
        raise MalformedTaskError(f"{root}: expected task folders, each with a {TASK_FILE}")
    candidates: dict[str, TaskCandidate] = {}
    for folder in folders:
        candidate = read_harbor(
            folder, egress_addresses=egress_addresses, isolation_min=isolation_min
        )
        if candidates.setdefault(candidate.task.task_id, candidate) is not candidate:
            words = f"metadata.penstock.task_id: {candidate.task.task_id!r} is another task's"
            raise MalformedTaskError(f"{folder / TASK_FILE}: {words}")
    return list(candidates.values())


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / TASK_FILE
    text = read_text(folder, TASK_FILE, bytes_max=SETTINGS_BYTES_MAX)
    try:
        settings = parse_toml(text, TASK_FILE)
    except CodecError as error:
        raise MalformedTaskError(f"{path}: {error}") from error
    version = settings.get("version", settings.get("schema_version"))
    if not isinstance(version, str) or not version.startswith("1."):
        raise MalformedTaskError(f"{path}: version: expected '1.x', got {version!r}")
    for name in ("metadata", "verifier", "agent", "environment"):
        if not isinstance(settings.get(name, {}), dict):
            raise MalformedTaskError(f"{path}: {name}: expected a table")
    return settings


def _fields(folder: Path, settings: dict[str, Any]) -> HarborFields:
    fields = parse_fields(settings)
    steps = [f"steps/{step.name}/trajectory.json" for step in fields.steps or []]
    for name in (*REFUSED_FILES, *steps):
        if (folder / name).exists():
            text = "expected none: a task is one image and one machine, and begins with no context"
            raise MalformedTaskError(f"{folder / name}: {text}")
    return fields


def _egress(
    folder: Path, fields: HarborFields, own: dict[str, Any], *, allows_addresses: bool
) -> list[str]:
    """Return the hosts that Penstock's own field names, else those of Harbor's network fields."""
    field = "metadata.penstock.egress"
    try:
        if "egress" in own:
            rules: list[str] = converted(folder, own["egress"], list[str], field)
        else:
            field, rules = "allowed_hosts", fields.egress
        parse_rules(rules, allows_addresses=allows_addresses)
    except EgressRuleError as error:
        raise MalformedTaskError(f"{folder / TASK_FILE}: {field}: {error}") from error
    return rules


def _image(folder: Path, fields: HarborFields, own: dict[str, Any]) -> str:
    """Return the image that Penstock's own field names, else the one that Harbor would pull."""
    image = fields.environment.docker_image
    if "image" in own:
        image = converted(folder, own["image"], str, "metadata.penstock.image")
    return pinned(image) if image else ""


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


def _start(folder: Path, *, has_image: bool) -> Tree:
    """Return the files that an agent starts with; without an image, a Dockerfile says no more."""
    if not (folder / ENVIRONMENT).is_dir():
        return {}
    has_dockerfile = (folder / ENVIRONMENT / DOCKERFILE).exists()
    if (folder / START_FOLDER).is_dir() and not has_dockerfile:
        return read_tree(folder, START_FOLDER)
    context = read_tree(folder, ENVIRONMENT)
    context.pop(DOCKERFILE, None)
    dockerfile = read_text(folder, f"{ENVIRONMENT}/{DOCKERFILE}") if has_dockerfile else ""
    try:
        if not has_image:
            check_instructions(dockerfile, context)
        return start_files(dockerfile, context)
    except DockerfileError as error:
        raise MalformedTaskError(f"{folder / ENVIRONMENT / DOCKERFILE}: {error}") from error
