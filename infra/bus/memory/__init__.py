"""The bus in memory: a seeded simulation of JetStream, with faults, for tests and tools."""
