"""Penstock: reinforcement learning for coding agents as typed events on durable streams."""
