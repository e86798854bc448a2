"""The recorded results of a task's set-ups, which are not the policy's changes.

```
 judge, once a task ─▶ SetUpRecorded 0, 1, .. ─▶ made by step
 what an episode left ── but for what is just as it was made ──▶ what the policy changed
```
An episode's changes are against the files that its task wrote, so what `setup.sh` made is among
them. Once the policy has used the episode's machine, a file in it does not show who wrote it. A
file with exactly the content that the task's set-up creates does not count as the policy's.
"""

from collections.abc import Mapping

from penstock.envs.tasks.changes import Changes
from penstock.messages.bus import ObjectStore
from penstock.messages.episode import SetUpRecorded, set_up_key
from penstock.messages.reading.trajectories import Last, load_files
from penstock.messages.task import Task

Made = dict[str, bytes | None]
"""What a task's own set-up made of its files: path -> content, None where it removed one."""


def has_set_up(task: Task) -> bool:
    """Return whether a `setup.sh` runs before any of a task's steps."""
    return any(one.has_setup for one in (task, *task.steps))


async def recorded_set_ups(store: ObjectStore, last: Last, task: Task) -> list[Made]:
    """Return by step what its set-up and earlier ones made; empty if no judge has recorded it.

    Raises:
        CodecError: The recorded object is missing or malformed.
        StoreUnreachableError: The store did not answer.

    """
    made: list[Made] = []
    if not has_set_up(task):
        return made
    for step in range(len(task.steps) + 1):
        event = await last(SetUpRecorded, set_up_key(task.split, task.task_id, step))
        if event is None:
            return []
        files = await load_files(store, event.files)
        made.append(made_by(Changes(files=files.changed, deleted=event.deleted)))
    return made


def made_by(changes: Changes) -> Made:
    """Return what a set-up made, from the changes that it left in a separate machine."""
    return changes.files | dict.fromkeys(changes.deleted)


def begun_with(contents: Mapping[str, bytes], made: Made) -> dict[str, bytes]:
    """Return a task's files after its set-up."""
    return {path: data for path, data in {**contents, **made}.items() if data is not None}


def own_changes(left: Changes, contents: Mapping[str, bytes], made: Made) -> Changes:
    """Return only the policy's changes, without files that equal those of set-ups.

    Args:
        left: Changes of an episode relative to the task's files.
        contents: The task's files.
        made: Files made by the set-up.

    """
    gone = set(left.deleted)
    now = {
        path: left.files.get(path, None if path in gone else contents.get(path)) for path in made
    }
    changed = {path: data for path, data in now.items() if data != made[path]}
    files = {path: data for path, data in left.files.items() if path not in made}
    files |= {path: data for path, data in changed.items() if data is not None}
    deleted = [path for path in left.deleted if path not in made]
    deleted += [path for path, data in changed.items() if data is None]
    return Changes(files=files, deleted=sorted(deleted), states=left.states)
