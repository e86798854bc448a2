"""The fields of Harbor's `task.toml`, schema 1.4: each has an effect, or is refused by name.

What Harbor does not know has no effect there, and none here: it is kept, and named.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.envs.sandbox import WORK_NAMES
from penstock.envs.tasks.harbor.schema import (
    HarborFieldError,
    HarborFields,
    HarborStep,
    HarborVerifier,
)

NAME_BYTES_MAX = 255
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?\Z", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)` - at `\$\.?(.*)`\Z", re.DOTALL)
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`\Z", re.DOTALL)
_ODD = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICE = re.compile(r"CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[1-9¹²³]", re.IGNORECASE)


UNKNOWN_MAX = 64


def parse_fields(settings: dict[str, Any]) -> tuple[HarborFields, list[str]]:
    """Return the fields of a task's settings, and the names of those that Harbor does not know.

    Raises:
        HarborFieldError: Fields are of a wrong type, or ask for what no machine has: one a line.

    """
    unknown: list[str] = []
    while True:
        try:
            fields = msgspec.convert(settings, HarborFields)
            break
        except (msgspec.ValidationError, RecursionError) as error:
            name = _unknown(str(error))
            if not name or len(unknown) == UNKNOWN_MAX:
                raise HarborFieldError(_named(str(error))) from error
            settings = _without(settings, name)
            unknown.append(name)
    refusals = _refusals(fields)
    for step, given in enumerate(fields.steps or []):
        refusals |= _step_refusals(f"steps[{step}]", given, (fields.steps or [])[:step])
    refused = [f"{field}: {text}" for field, (is_asked, text) in refusals.items() if is_asked]
    if refused:
        raise HarborFieldError("\n".join(refused))
    return fields, unknown


def _unknown(error: str) -> str:
    """Return the name of an unknown field, with its tables; empty where something else is wrong."""
    found = _UNKNOWN.match(error)
    if found is None or (found[2] and "[" in found[2]):
        return ""  # In a list, e.g. a step's: there a name may be a mistake.
    return f"{found[2]}.{found[1]}" if found[2] else found[1]


def _without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    table, _, rest = name.partition(".")
    if table in settings and rest and isinstance(settings[table], dict):
        return settings | {table: _without(settings[table], rest)}
    return {key: value for key, value in settings.items() if key != name}


_Refusals = dict[str, tuple[object, str]]
"""(whether the field is refused, reason) by field."""
_HOSTS = "expected with network_mode = 'allowlist' alone"
_NO_CHECKS = "expected none: nothing is started in a machine"
_NO_ARTIFACTS = "expected none: only files of /app leave a machine"
_USER = "expected none: everything runs as the machine's own user"


def _refusals(fields: HarborFields) -> _Refusals:
    agent, environment = fields.agent, fields.environment
    return {
        "multi_step_reward_strategy": (
            fields.multi_step_reward_strategy and not fields.steps, "expected with steps alone"
        ),
        "artifacts": (fields.artifacts, _NO_ARTIFACTS),
        "agent.user": (agent.user is not None, _USER),
        "agent.allowed_hosts": (
            agent.allowed_hosts is not None and agent.network_mode != "allowlist", _HOSTS
        ),
        **_verifier_refusals("verifier", fields.verifier),
        "environment.os": (environment.os.lower() != "linux", "expected 'linux'"),
        "environment.gpus": (environment.gpus, "expected none: no machine has one"),
        "environment.gpu_types": (environment.gpu_types, "expected none: no machine has one"),
        "environment.tpu": (environment.tpu is not None, "expected none: no machine has one"),
        "environment.mcp_servers": (environment.mcp_servers, "expected none: agents have none"),
        "environment.env": (environment.env, "expected none: tools set no variables"),
        "environment.skills_dir": (environment.skills_dir, "expected none: agents read no skills"),
        "environment.healthcheck": (environment.healthcheck is not None, _NO_CHECKS),
        "environment.workdir": (
            environment.workdir not in {None, *WORK_NAMES},
            f"expected one of {', '.join(WORK_NAMES)}, which are one folder",
        ),
        "environment.allowed_hosts": (
            environment.allowed_hosts is not None and environment.network_mode != "allowlist",
            _HOSTS,
        ),
    }  # fmt: skip


def _verifier_refusals(place: str, verifier: HarborVerifier) -> _Refusals:
    apart = "expected 'shared': for a verifier apart from the code, metadata.penstock.separated"
    return {
        f"{place}.user": (verifier.user is not None, _USER),
        f"{place}.environment_mode": (verifier.environment_mode == "separate", apart),
        f"{place}.environment": (
            verifier.environment is not None, "expected none: it runs in the task's own image"
        ),
        f"{place}.collect": (verifier.collect, "expected none: there are no compose services"),
        f"{place}.allowed_hosts": (
            verifier.allowed_hosts is not None and verifier.network_mode != "allowlist", _HOSTS
        ),
    }  # fmt: skip


def _step_refusals(place: str, step: HarborStep, before: Sequence[HarborStep]) -> _Refusals:
    agent, key = step.agent, _name_key(step.name)
    network = "expected none: an episode has the hosts of [agent] or [environment]"
    return {
        f"{place}.name": (
            not _is_portable(step.name) or key in {_name_key(other.name) for other in before},
            f"expected the portable name of a folder that no step before has, got {step.name!a}",
        ),
        f"{place}.agent.user": (agent.user is not None, _USER),
        f"{place}.agent.network_mode": (agent.network_mode is not None, network),
        f"{place}.agent.allowed_hosts": (agent.allowed_hosts is not None, network),
        **_verifier_refusals(f"{place}.verifier", step.verifier),
        f"{place}.healthcheck": (step.healthcheck is not None, _NO_CHECKS),
        f"{place}.artifacts": (step.artifacts, _NO_ARTIFACTS),
    }


def _is_portable(name: str) -> bool:
    """Return whether a name is a valid folder name on every system, as Harbor requires."""
    stem = name.partition(".")[0].rstrip(" ")
    return (
        bool(name.strip())
        and name.isprintable()
        and not name.endswith((".", " "))
        and _ODD.search(name) is None
        and _DEVICE.fullmatch(stem) is None
        and len(name.encode()) <= NAME_BYTES_MAX
    )


def _name_key(name: str) -> str:
    # Some file systems ignore case, or normalize Unicode.
    return unicodedata.normalize("NFC", name).casefold()


def _named(error: str) -> str:
    """Return a decoder's error with the field first."""
    if found := _UNKNOWN.match(error):
        place = f"{found[2]}." if found[2] else ""
        return f"{place}{found[1]}: no field of Harbor 1.4"
    if found := _MISSING.match(error):
        return f"{found[2]}.{found[1]}: is required"
    if found := _PLACE.match(error):
        return f"{found[2]}: {found[1]}"
    return error
