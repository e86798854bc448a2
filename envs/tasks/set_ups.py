"""What a task's set-up makes of its files, as the judge recorded it, and what is left of changes.

```
 judge, once a task ─▶ SetUpRecorded 0, 1, .. ─▶ made by step
 what an episode left ── but for what is just as it was made ──▶ what the policy changed
```
An episode's changes are against the files that its task wrote, so what `setup.sh` made is among
them. What lies in the episode's own machine proves nothing about who wrote it once the policy has
had that machine; a file with the very content that the task itself makes needs no proof.
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
    """Return by step what its set-up and those before it made; empty where no judge has looked.

    Raises:
        CodecError: What the log names is absent, or is not that.
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
    """Return what a set-up made, from the changes that it left in a machine of its own."""
    return changes.files | dict.fromkeys(changes.deleted)


def begun_with(contents: Mapping[str, bytes], made: Made) -> dict[str, bytes]:
    """Return a task's files as its set-up leaves them."""
    return {path: data for path, data in {**contents, **made}.items() if data is not None}


def own_changes(left: Changes, contents: Mapping[str, bytes], made: Made) -> Changes:
    """Return the policy's changes alone: without what is as set-ups made it.

    Args:
        left: What an episode left, against the task's files.
        contents: Those files.
        made: Of them, by the set-up.

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
