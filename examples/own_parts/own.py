"""The parts of our own that `config.toml` beside this file names as `own:NAME`."""

from collections.abc import Iterator

import penstock

BUILT_IN = penstock.tools("1")


async def read_numbered(toolbox: penstock.Toolbox, arguments: dict[str, object]) -> str:
    """Read a file as the built-in tool does, and number its lines."""
    text = await BUILT_IN["read_file"].run(toolbox, arguments)
    return "".join(f"{n:3} {line}\n" for n, line in enumerate(text.splitlines(), 1))


async def count_lines(toolbox: penstock.Toolbox, arguments: dict[str, object]) -> str:
    """Count the lines of a file; what is no text file is an invalid call, as for read_file."""
    text = await BUILT_IN["read_file"].run(toolbox, arguments)
    return str(len(text.splitlines()))


PATH = penstock.Argument("relative to the repository", bound_min=1, bound_max=255)
TOOLS = {
    **BUILT_IN,
    "read_file": penstock.ToolSpec(read_numbered, "Read a file with line numbers.", {"path": PATH}),
    "count_lines": penstock.ToolSpec(count_lines, "Count the lines of a file.", {"path": PATH}),
}


class Looks:
    """An episode is solved if the agent read a file by our tool and then ended by itself."""

    version = "1"

    def __init__(self, config: penstock.JudgeConfig) -> None:
        """Take the settings of `[judge]`; this judge needs none."""

    async def judge(
        self, rollout: penstock.Trajectory, task: penstock.GradedTask, ctx: penstock.Context
    ) -> penstock.Findings:
        """Grade one rollout by what it did, whatever its tests say."""
        done = rollout.finished
        has_read = any("read_file" in names for names in done.tool_names)
        if has_read and done.end == "finished":
            return penstock.Findings(outcome=penstock.Outcome.SOLVED)
        detail = f"read a file: {has_read}, end: {done.end}"
        return penstock.Findings(outcome=penstock.Outcome.FAILED, detail=detail)


class FewFiles:
    """The hidden tests decide, and a solution must also have changed few files."""

    version = "1"
    num_files_max = 3

    def __init__(self, config: penstock.JudgeConfig) -> None:
        """Take the settings of `[judge]`."""
        self._tests = penstock.HiddenTestsJudge(config)

    async def judge(
        self, rollout: penstock.Trajectory, task: penstock.GradedTask, ctx: penstock.Context
    ) -> penstock.Findings:
        """Grade one rollout."""
        found = await self._tests.judge(rollout, task, ctx)
        return self.limited(found, len(rollout.files))

    def limited(self, found: penstock.Findings, num_files: int) -> penstock.Findings:
        """Return the findings, failed where too many files were changed."""
        if found.outcome is not penstock.Outcome.SOLVED or num_files <= self.num_files_max:
            return found
        detail = f"changed {num_files} files, at most {self.num_files_max}"
        return penstock.Findings(outcome=penstock.Outcome.FAILED, detail=detail)


def tasks(seed: int) -> Iterator[penstock.TaskCandidate]:
    """Yield tasks of both splits: a function that is wrong, and hidden tests that show it."""
    for number in range(8):
        name, wanted = f"add_{seed}_{number}", number + 2
        wrong = f"def {name}(value):\n    return value + {wanted - 1}\n"
        test = f"from {name} import {name}\nprint({name}(1))\nprint({name}(10))\n"
        yield penstock.TaskCandidate(
            task=penstock.Task(
                task_id=name,
                category="own",
                split=penstock.Split.HELDOUT if number % 4 == 0 else penstock.Split.TRAIN,
                instruction=f"{name} in {name}.py should add {wanted}. Fix it.",
                files={f"{name}.py": wrong},
            ),
            hidden=penstock.HiddenTests(
                task_id=name,
                files={"check.py": test},
                argv=["python3", "check.py"],
                expected=[str(1 + wanted), str(10 + wanted)],
                gold_files={f"{name}.py": wrong.replace(str(wanted - 1), str(wanted))},
            ),
            origin=penstock.TaskOrigin(source="own", repository=name, kind="bug"),
        )


def clipped(tokens: penstock.LossTokens, config: penstock.LossConfig) -> penstock.TokenLosses:
    """REINFORCE whose advantages are bounded: -w clip(A) log pi."""
    advantages = tokens.advantages.clamp(-2.0, 2.0)
    values = -tokens.weights * advantages * tokens.current
    return penstock.TokenLosses(values=values, is_clipped=advantages != tokens.advantages)


# No ratio of its own: the correction's weights make up for tokens of earlier versions.
loss = penstock.LossSpec(clipped, ratio_against=None)
