"""Settings of all tests."""

from hypothesis import settings

# A busy machine is no failure, and a run of the tests says the same as the one before.
settings.register_profile("any machine", deadline=None, derandomize=True)
settings.load_profile("any machine")
