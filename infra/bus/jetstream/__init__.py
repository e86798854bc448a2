"""The bus on NATS JetStream; the only code that speaks the NATS protocol to a server."""
