"""What services are started on."""

import shutil

import pytest

from ..launched import Launched

RUN_S_MAX = 1800.0
"""On a machine with much other work."""


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    settings = (
        "trainer.steps_max=2",
        "users.num_requests=0",
        "prepare.num_heldout_tasks=2",
        f"run.wall_s_max={RUN_S_MAX}",
    )
    launched = Launched(folder, *settings)
    assert launched.wait(RUN_S_MAX) == 0, launched.output
    return folder


@pytest.fixture(scope="module")
def runs(finished, tmp_path_factory):
    """A module's copy of it."""
    return shutil.copytree(finished, tmp_path_factory.mktemp("runs") / "runs")
