"""Requests and replies of services that are asked by one role alone."""
