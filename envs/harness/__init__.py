"""The agent's tools, the same in training and in production, over any `Sandbox`.

`run_calls` is all that a rollout worker needs. To add a tool: one async function in the file of
its kind, one `ToolSpec` line in `registry.py`, and a higher `HARNESS_VERSION`.
"""

HARNESS_VERSION = "1"
"""Goes up with every change to a tool's wording or behavior: recorded episodes depend on it."""
