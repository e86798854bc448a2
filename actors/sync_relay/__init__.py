"""The sync relay."""
