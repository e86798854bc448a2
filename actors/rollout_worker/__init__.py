"""The rollout worker."""
