"""What an episode left, against a task's files."""

import pytest

from penstock.envs.tasks.changes import Changes, ChangesError, read_changes
from penstock.examples.quickstart.ladder.dry_run import DryRunSandbox

BOUNDS = {"num_files_max": 1, "num_bytes_max": 10}


async def test_a_file_of_the_task_above_the_bound_counts_only_where_it_was_changed() -> None:
    initial = {"large.csv": b"1,2\n" * 30, "m.py": b"1\n"}
    sandbox = DryRunSandbox({path: data.decode() for path, data in initial.items()})
    assert await read_changes(sandbox, initial, **BOUNDS) == Changes()
    sandbox.files["m.py"] = "2\n"
    assert await read_changes(sandbox, initial, **BOUNDS) == Changes(files={"m.py": b"2\n"})
    sandbox.files["large.csv"] += "3"
    with pytest.raises(ChangesError, match="more than 10 bytes"):
        await read_changes(sandbox, initial, **BOUNDS)
