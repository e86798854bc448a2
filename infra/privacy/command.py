"""`penstock lineage WHAT` and `penstock erase --user U`."""

import argparse
import re

import msgspec

from penstock.actors.runtime.files import create_secret
from penstock.gateway.identity import user_pseudonym
from penstock.infra.privacy.erase import Erasure, erase
from penstock.infra.privacy.lineage import Found, read
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.liveness import is_up
from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.run.vault import open_vault
from penstock.messages.errors import ConfigError

_PSEUDONYM = re.compile(r"u-[0-9a-f]{32}|k-[A-Za-z0-9_-]{1,64}")
_LINES_MAX = 20


async def lineage_command(arguments: argparse.Namespace) -> int:
    """Print what trained a version, or which versions contain a user, request or feedback."""
    run = await reached_run(arguments)
    async with open_log(run, "lineage") as bus:
        found = (await read(bus)).find(arguments.what, arguments.tenant)
    for each in found:
        print(_text(each))
    if arguments.json:
        print(msgspec.json.encode(found).decode())
    return 0


async def erase_command(arguments: argparse.Namespace) -> int:
    """Erase a user's content key; with `--retrain`, make a run that never had the user."""
    run = await reached_run(arguments)
    tenant, user = _user(run, arguments.tenant, arguments.user)
    async with open_log(run, "erase") as bus:
        erasure = await erase(bus, open_vault(run), tenant, user, is_up=await is_up(run, bus))
    print(_erased(erasure))
    if arguments.json:
        print(msgspec.json.encode(erasure).decode())
    return 0


def _user(run: RunDir, tenant: str, name: str) -> tuple[str, str]:
    """Return tenant and pseudonym of a user, who may be given as requests name them.

    Raises:
        ConfigError: No tenant where one is needed.

    """
    if name.startswith("k-") and not tenant:
        tenant = name.removeprefix("k-")
    if not tenant:
        raise ConfigError("--tenant: expected whose user it is; a key that names none is a tenant")
    if _PSEUDONYM.fullmatch(name):
        return tenant, name
    return tenant, user_pseudonym(create_secret(run.master_key), tenant, name)


def _text(found: Found) -> str:
    lines = [f"{found.kind} {found.name}: {_where(found)}"]
    if found.is_erased:
        lines.append("  erased: its content cannot be read any more")
    for sample in found.samples[-_LINES_MAX:]:
        users, feedback = ", ".join(sample.users), ", ".join(sample.feedback) or "no feedback"
        revision = f", revision {sample.revision}" if sample.revision else ""
        lines.append(
            f"  version {sample.step}: {sample.sample_id}{revision} of {users}: "
            f"{len(sample.requests)} requests, {feedback}"
        )
    if len(found.samples) > _LINES_MAX:
        lines.append(f"  and {len(found.samples) - _LINES_MAX} before; --json has all")
    return "\n".join(lines)


def _where(found: Found) -> str:
    if found.kind == "version":
        users = {user for sample in found.samples for user in sample.users}
        return f"{len(found.samples)} live samples of {len(users)} users are in it"
    if found.first_version is None:
        return "in no version"
    return f"in every version from {found.first_version} on"


def _erased(erasure: Erasure) -> str:
    text = f"{erasure.tenant}/{erasure.user}: content of {erasure.num_requests} requests erased"
    if not erasure.steps:
        return f"{text}; no version was trained with it"
    return (
        f"{text}; versions from {erasure.steps[0]} on keep what {erasure.num_samples} samples "
        "taught them, and what others sampled from these versions"
    )
