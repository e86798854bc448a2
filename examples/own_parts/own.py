"""A tool and a judge of our own, which `config.toml` beside this file names as `own:NAME`."""

import penstock

BUILT_IN = penstock.tools("1")


async def read_numbered(toolbox: penstock.Toolbox, arguments: dict[str, object]) -> str:
    """Read a file as the built-in tool does, and number its lines."""
    text = await BUILT_IN["read_file"].run(toolbox, arguments)
    return "".join(f"{n:3} {line}\n" for n, line in enumerate(text.splitlines(), 1))


PATH = penstock.Argument("relative to the repository", bound_min=1, bound_max=255)
WORDS = "Read a file with line numbers."
TOOLS = {**BUILT_IN, "read_file": penstock.ToolSpec(read_numbered, WORDS, {"path": PATH})}


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
