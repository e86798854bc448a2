"""Requests and replies of services that only one role calls."""
