"""Requests of services that only one role calls, and the state that gateways share."""
