"""The agent's tools, the same in training and in production, over any `Sandbox`.

Two versions are there, and an episode has one. Version 1, `run_calls`, is small: the quickstart's
policy learns it; its wording never changes. Version 2, `Session`, is what a product offers: typed
arguments, a terminal that remembers, background jobs, lints, semantic search.

To add a tool: one async function in the file of its kind and one entry in `tools.py`; a change of
wording or behavior is a new version, for recorded episodes depend on the old one.
"""

HARNESS_VERSION = "1"
"""Of episodes that name none."""
HARNESS_VERSION_2 = "2"
HARNESS_VERSIONS = (HARNESS_VERSION, HARNESS_VERSION_2)
