"""The names of `import penstock`, each imported when it is first used."""

NAMES: dict[str, tuple[str, str]] = {
    "run": ("penstock.infra.api.runs", "run"),
    "open_run": ("penstock.infra.api.runs", "open_run"),
    "Run": ("penstock.infra.api.runs", "Run"),
    "tools": ("penstock.envs.harness.tools", "tools_of"),
    "Tool": ("penstock.envs.harness.toolbox", "ToolSpec"),
    "Argument": ("penstock.envs.harness.tool_calls", "Argument"),
    "InvalidCallError": ("penstock.envs.harness.tool_calls", "InvalidCallError"),
    "Task": ("penstock.messages.task", "Task"),
    "HiddenTests": ("penstock.messages.task", "HiddenTests"),
    "TaskCandidate": ("penstock.envs.tasks.source", "TaskCandidate"),
    "TaskOrigin": ("penstock.envs.tasks.source", "TaskOrigin"),
    "Findings": ("penstock.actors.judge.reward", "Findings"),
    "Outcome": ("penstock.messages.reward", "Outcome"),
    "LossTokens": ("penstock.actors.trainer.objective.losses", "LossTokens"),
    "TokenLosses": ("penstock.actors.trainer.objective.losses", "TokenLosses"),
}
