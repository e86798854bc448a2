"""Reads and writes tasks in Harbor's format, including untrusted folders."""
