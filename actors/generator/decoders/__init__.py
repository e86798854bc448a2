"""Implementations of the torch engine's step: compiled C and plain torch.

Each has a `name` and the methods `prepare` (of a version's weights), `step` and `sample`.
`EngineCore` chooses one; plain torch serves where C cannot be compiled.
"""
