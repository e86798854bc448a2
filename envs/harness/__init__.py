"""The agent's tools, the same in training and in production, over any `Sandbox`.

An episode has one version. Version 1 (`tools_v1.py`) is small: the quickstart's policy learns it,
and its wording never changes. Version 2 (`tools_v2.py`) is what a product offers: typed
arguments, a terminal with state, background jobs, lints, semantic search. `session.py` carries out
the calls of a turn with either, `versions.py` says what a prompt and a client see of it.

To add a tool: an async function that takes a `Toolbox` and its arguments, and one entry in the
table of a version. Recorded episodes depend on the wording and behavior of theirs, so that a new
tool, or a change of an old one, begins a version: "A built-in tool" in CONTRIBUTING.md.
"""

HARNESS_VERSION = "1"
"""Version of episodes that name none."""
HARNESS_VERSION_2 = "2"
HARNESS_VERSIONS = (HARNESS_VERSION, HARNESS_VERSION_2)
