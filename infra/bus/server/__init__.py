"""The embedded nats-server: find a binary, start it, and end it with its parent."""
