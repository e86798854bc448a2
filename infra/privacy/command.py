"""`penstock lineage WHAT` and `penstock erase --user U`."""

import argparse
import re
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.runtime.vault import Vault
from penstock.gateway.exchange.spool import Spool
from penstock.gateway.identity import user_pseudonym
from penstock.infra.export.folder import check_target
from penstock.infra.output import print_line
from penstock.infra.privacy.erase import Erasure, erase
from penstock.infra.privacy.lineage import LineageRecord, read
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.liveness import is_up
from penstock.infra.run.runs import RunDir, master_key, open_log, open_vault
from penstock.messages.bus import Bus
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.feedback import owner_of

_PSEUDONYM = re.compile(r"u-[0-9a-f]{32}|k-[A-Za-z0-9_-]{1,64}")
_LINES_MAX = 20


async def lineage_command(arguments: argparse.Namespace) -> int:
    """Print which samples trained a version, or which versions contain a user or request."""
    run = await reached_run(arguments)
    async with open_log(run, "lineage") as bus:
        found = (await read(bus)).find(arguments.what, arguments.tenant)
    for each in found:
        print_line(_text(each))
    if arguments.json:
        print_line(msgspec.json.encode(found).decode())
    return 0


async def erase_command(arguments: argparse.Namespace) -> int:
    """Erase a user's content key; with `--retrain`, write a model without erased users."""
    run = await reached_run(arguments)
    tenant, user = _user(run, arguments.tenant, arguments.user)
    folder: Path | None = arguments.retrain
    if folder is not None:
        # Before the erasure, which cannot be undone.
        check_target(folder)
    result: dict[str, Any] = {}
    async with open_log(run, "erase") as bus:
        try:
            erasure = await erase_all(run, bus, open_vault(run), tenant, user)
            print_line(_erased(erasure))
            result = msgspec.to_builtins(erasure)
        except NotFoundError:  # Nothing is stored. `--retrain` also works after the erasure.
            if folder is None or not (await read(bus)).is_erased(tenant, user):
                raise
        if folder is not None:
            result["retrained"] = await _retrain(run, bus, folder)
    if arguments.json:
        print_line(msgspec.json.encode(result).decode())
    return 0


async def erase_all(run: RunDir, bus: Bus, vault: Vault, tenant: str, user: str) -> Erasure:
    """Erase a user, including records that wait for the log; raises what `erase` raises."""
    # Spooled records first: stored after the erasure, they would get a new key.
    erasures = await vault.num_erasures(owner_of(tenant, user)) + 1
    num_waiting = Spool(run.gateway_spool, 0).erase(tenant, user, erasures)
    try:
        found = await erase(bus, vault, tenant, user, is_up=await is_up(run, bus))
    except NotFoundError:
        # Other hosts' disks may have more, which no log tells: the tombstone keeps it from there.
        await vault.erase(owner_of(tenant, user))
        if not num_waiting:
            raise
        found = Erasure(
            tenant=tenant, user=user, key_id="", num_requests=0, num_samples=0, steps=[]
        )
    return msgspec.structs.replace(found, num_requests=found.num_requests + num_waiting)


async def _retrain(run: RunDir, bus: Bus, folder: Path) -> dict[str, Any] | None:
    from penstock.infra.privacy.erase import retrain_run

    retrained = await retrain_run(run, bus, folder)
    if retrained is None:
        print_line("no version was trained with an erased user: nothing to train again")
        return None
    print_line(
        f"{folder}: version {retrained.step_last} without erased users, trained again from "
        f"step {retrained.step_first} on, {retrained.num_left_out} samples left out"
    )
    return msgspec.to_builtins(retrained)


def _user(run: RunDir, tenant: str, name: str) -> tuple[str, str]:
    """Return tenant and pseudonym of a user, given by pseudonym or by the name in requests.

    Raises:
        ConfigError: The tenant is missing.

    """
    # A key without a tenant is a tenant and a user at once.
    if name.startswith("k-") and not tenant:
        tenant = name.removeprefix("k-")
    if not tenant:
        raise ConfigError("--tenant: expected whose user it is; a key that names none is a tenant")
    if _PSEUDONYM.fullmatch(name):
        return tenant, name
    return tenant, user_pseudonym(master_key(run), tenant, name)


def _text(found: LineageRecord) -> str:
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


def _where(found: LineageRecord) -> str:
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
