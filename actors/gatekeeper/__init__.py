"""The gatekeeper."""
