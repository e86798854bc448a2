"""The Firecracker backend: microVMs driven over its HTTP API on a Unix socket."""
