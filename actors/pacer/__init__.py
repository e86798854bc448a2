"""The pacer."""
