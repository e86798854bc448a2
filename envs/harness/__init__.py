"""The agent's tools, the same in training and in production, over any `Sandbox`.

An episode uses one version of the tools (`tools.py`). Version 1 is small: the quickstart's policy
learns it, and its wording never changes. Version 2 is what a product offers: typed arguments, a
stateful terminal, background jobs, lints, semantic search. `session.py` carries out the calls of a
turn with either version.

To add a tool: an async function that takes a `Toolbox` and its arguments, and one entry in the
table of a version. Recorded episodes depend on the wording and behavior of theirs, so that a new
tool, or a change of an old one, begins a version: "A built-in tool" in CONTRIBUTING.md.
"""

HARNESS_VERSION = "1"
"""Version of episodes that name none."""
HARNESS_VERSION_2 = "2"
HARNESS_VERSIONS = (HARNESS_VERSION, HARNESS_VERSION_2)
