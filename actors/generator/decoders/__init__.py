"""What computes the engine's steps: compiled C, torch where nothing compiles, a GPU's graphs.

Each has `name`, `prepare` for the weights of a version, `step` and `sample`; `EngineCore` chooses.
"""
