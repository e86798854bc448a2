"""Tasks for a published model of 135M parameters: write one small file as asked.

`tasks` are what RL trains on; `python -m penstock.examples.smollm2` writes demonstrations of the
tool, of another kind of task than most of them. Answers are one short line, so that an episode is
one turn of about 40 tokens.
"""

import random
from collections.abc import Iterator

import penstock

WORDS = (
    *("apple", "river", "stone", "cloud", "table", "green", "house", "music", "paper", "light"),
    *("water", "bread", "chair", "glass", "horse", "lemon", "mouse", "night", "ocean", "plant"),
    *("queen", "robot", "shirt", "train", "uncle", "voice", "wheel", "yacht", "zebra", "brick"),
)
NUM_TASKS = 600
LIMITS = penstock.Limits(num_turns_max=1, num_tokens_max=256, turn_tokens_max=48, wall_s_max=600.0)
"""A turn waits for its turn: two cores sample about 70 tokens a second."""
KINDS = ("larger", "smaller", "print", "first")
"""Kinds of tasks of RL; `word` is the demonstrations'."""

TOOLS = {name: penstock.tools("1")[name] for name in ("write_file", "finish")}
"""The harness: two tools, of which a task needs one."""


def asked(kind: str, draw: random.Random) -> tuple[str, str, str]:
    """Return a task's instruction, its file and the line that the file is to have."""
    low = draw.randint(2, 60)
    high = low + draw.randint(1, 39)
    pair = (low, high) if draw.random() < 0.5 else (high, low)
    word, other = draw.sample(WORDS, 2)
    name = f"{other}.txt"
    if kind == "word":
        return f"Write the word {word} into the file {name}.", name, word
    if kind == "first":
        return f"Write the first of the words {word} and {other} into {name}.", name, word
    if kind == "print":
        text = f"Write a Python program {other}.py that prints {high}."
        return text, f"{other}.py", f"print({high})"
    bound = max if kind == "larger" else min
    text = f"Write the {kind} of {pair[0]} and {pair[1]} into the file {name}."
    return text, name, str(bound(pair))


def tasks(seed: int) -> Iterator[penstock.TaskCandidate]:
    """Yield tasks of both splits, one of four held out."""
    draw = random.Random(seed)
    seen: set[str] = set()
    for number in range(NUM_TASKS):
        kind = KINDS[number % len(KINDS)]
        instruction, file, line = asked(kind, draw)
        if instruction in seen:
            continue
        seen.add(instruction)
        task_id = f"{kind}-{seed}-{number}"
        # A program is graded by what it prints, any other file by its one line.
        shown = f"print(open({file!r}).read().strip())\n"
        run = f"exec(open({file!r}).read())\n"
        is_program = kind == "print"
        yield penstock.TaskCandidate(
            task=penstock.Task(
                task_id=task_id,
                category=kind,
                # Of each kind one in four.
                split=(penstock.Split.TRAIN, penstock.Split.HELDOUT)[number // len(KINDS) % 4 == 0],
                instruction=instruction,
                files={"README.md": "An empty project.\n"},
                limits=LIMITS,
            ),
            hidden=penstock.HiddenTests(
                task_id=task_id,
                files={"check.py": run if is_program else shown},
                argv=["python3", "check.py"],
                expected=[line[6:-1] if is_program else line],
                gold_files={file: f"{line}\n"},
            ),
            origin=penstock.TaskOrigin(source="smollm2", repository=task_id, kind="feature"),
        )
