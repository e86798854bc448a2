"""The quickstart's tasks and corpora as settings, for tests that need some."""

from penstock.infra.config.prepare import CorporaConfig, PrepareConfig, SourceConfig, SourceKind

MAKE = "penstock.examples.quickstart:"


def source(name="ladder", make="ladder_tasks", settings=None, **fields) -> SourceConfig:
    """A source of the ladder's tasks, or of `trail_tasks`."""
    settings = {"prefix": ""} if settings is None else settings
    kind = SourceKind.OWN
    return SourceConfig(name=name, kind=kind, make=MAKE + make, settings=settings, **fields)


def prepared(corpora=None, **fields) -> PrepareConfig:
    """A run on the ladder, with these settings of its corpora."""
    made = CorporaConfig(make=MAKE + "ladder_corpora", settings=corpora or {})
    return PrepareConfig(**{"sources": (source(),), "corpora": made} | fields)
