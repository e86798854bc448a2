"""The embedded nats-server: find a binary, start it, and end it with its parent.

To change a setting of the server: the configuration text in server.py.
"""
