"""The agent's tools, the same in training and in production, over any `Sandbox`.

An episode uses one version of the tools (`tools.py`). Version 1 is small and its wording never
changes, because the quickstart's policy learns it. Version 2 is for products: typed arguments, a
stateful terminal, background jobs, lints, semantic search. `session.py` runs the calls of a turn.

To add a tool, write an async function that takes a `Toolbox` and its arguments, and add it to the
table of a version. Recorded episodes depend on the wording and behavior of their version, so that
any new or changed tool needs a new version: "A built-in tool" in CONTRIBUTING.md.
"""

HARNESS_VERSION = "1"
"""Default version."""
HARNESS_VERSION_2 = "2"
HARNESS_VERSIONS = (HARNESS_VERSION, HARNESS_VERSION_2)
