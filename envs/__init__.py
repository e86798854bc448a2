"""Sandboxes, the task format, the agent harness's tools and the task factory."""
