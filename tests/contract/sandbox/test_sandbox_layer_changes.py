"""Episodes in a repository that an image layer brings: only what they changed is carried over."""

import shutil

import pytest
from tests.trajectories import trajectory

from penstock.actors.judge.hidden_tests import grade
from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.layers import layer_folder, layer_path
from penstock.envs.microvm.recipe.layer import LayerSources, build_layer
from penstock.envs.sandbox import BackendUnavailable
from penstock.envs.tasks.changes import Changes, ChangesError, list_work, read_changes
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.reward import Outcome
from penstock.messages.rollout import EpisodeEnd
from penstock.messages.task import HiddenTests, Purpose, Split, Task

from .check_sandbox import sh

pytestmark = [pytest.mark.vm, pytest.mark.timeout(200)]
START_S = 60.0
NUM_FILES, NUM_FILES_MAX, NUM_BYTES_MAX = 300, 8, 9999
EDITS = """\
cd src
mv m1.py moved.py; cp -p m2.py copied.py
echo A = 3 > m3.py; touch -d @0 m3.py
rm m4.py; cd ..; echo said > given.txt
"""
CHECK = """\
import pathlib
left = sorted(path.name for path in pathlib.Path("src").iterdir())
print(len(left), "m1.py" in left, "m4.py" in left, "moved.py" in left)
"""


@pytest.fixture
def backend(tmp_path):
    if shutil.which("mkfs.erofs") is None:
        pytest.skip("mkfs.erofs is missing: apt-get install erofs-utils")
    source = tmp_path / "repository" / "src"
    source.mkdir(parents=True)
    for number in range(NUM_FILES):
        (source / f"m{number}.py").write_text(f"A = {number}\n")
    sources = LayerSources(folder=source.parent)
    layer = build_layer("repository", sources, tmp_path / "vm", lambda line: None)
    try:
        return open_backend("uml", layer=layer_path(layer_folder(tmp_path / "vm"), layer.digest))
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture
async def machine(backend):
    machine = await backend.start(timeout_s=START_S)
    yield machine
    await machine.close()


async def changes_of(machine, layer=None):
    return await read_changes(
        machine, {"given.txt": b"given\n"}, num_files_max=NUM_FILES_MAX, has_layer=True,
        num_bytes_max=NUM_BYTES_MAX, layer=layer or {},
    )  # fmt: skip


async def test_what_a_layer_brought_is_no_change_and_what_became_of_it_is(machine, backend):
    brought = await list_work(machine)
    await machine.write_files({"given.txt": b"given\n"})
    assert len(brought) == NUM_FILES + 1  # and their folder
    assert await changes_of(machine, brought) == Changes()
    await sh(machine, EDITS)
    changes = await changes_of(machine, brought)
    left = {"src/moved.py": 1, "src/copied.py": 2, "src/m3.py": 3}
    told = {path: f"A = {number}\n".encode() for path, number in left.items()}
    assert changes.files == told | {"given.txt": b"said\n"}
    assert changes.deleted == ["src/m1.py", "src/m4.py"]
    task = Task(
        task_id="t", category="r", split=Split.TRAIN, instruction="", files={"given.txt": ""}
    )
    hidden = HiddenTests(
        task_id="t", files={"_check.py": CHECK}, argv=["python3", "_check.py"], timeout_s=START_S,
        expected=[f"{NUM_FILES} False False True"],
    )  # fmt: skip
    rollout = trajectory(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0,
        purpose=Purpose.TRAIN, task_id="t", category="r", end=EpisodeEnd.FINISHED, turns=[],
        files=changes.files, deleted=changes.deleted,
    )  # fmt: skip
    fresh = await backend.start(timeout_s=START_S)
    findings = await grade(rollout, GradedTask(task=task, hidden=hidden), fresh, 65536)
    await fresh.close()
    assert findings.outcome is Outcome.SOLVED, findings


async def test_changes_of_a_layer_are_bounded(machine):
    brought = await list_work(machine)
    await sh(machine, "rm src/m?.py")
    with pytest.raises(ChangesError, match="11 are gone, 8 may be"):
        await changes_of(machine, brought)
    await sh(machine, "touch src/m1?.py")
    with pytest.raises(ChangesError, match="10 files and 1 folders are there"):
        await changes_of(machine)
