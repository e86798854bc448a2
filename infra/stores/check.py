"""Sees that a run's object store answers before anything is started; names the setting if not."""

import os
import re

from penstock.infra.stores.s3 import S3Store
from penstock.infra.stores.settings import StoreKind, StoreSection
from penstock.messages.errors import ConfigError, StoreUnreachableError

_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_PREFIX = "penstock-check"
"""Under which there is nothing, so that the answer is short."""
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED = {"401", "403"}


def check_store(section: StoreSection) -> None:
    """Ask an S3 server for one page of its keys; the other kinds are the run's own.

    Raises:
        ConfigError: credentials, `store.bucket` or `store.endpoint` are missing or wrong, or the
            extra is not installed.

    """
    if section.kind is not StoreKind.S3:
        return
    if section.endpoint:  # Elsewhere credentials may come from the machine's role.
        missing = [name for name in _CREDENTIALS if not os.environ.get(name)]
        if missing:
            raise ConfigError(f"store.kind s3: expected {' and '.join(missing)} in the environment")
    store = S3Store.open(section.bucket, prefix=_PREFIX, endpoint=section.endpoint, patience_s=0.0)
    try:
        store.probe()
    except StoreUnreachableError as error:
        raise ConfigError(_cause(section, str(error))) from error


def _cause(section: StoreSection, text: str) -> str:
    found = _STATUS.search(text)
    status = found.group(1) if found else ""
    where = section.endpoint or "Amazon S3"
    if status in _REFUSED:
        return f"{' and '.join(_CREDENTIALS)}: {where} refuses them: {text}"
    if status == "404":
        return f"store.bucket: {where} has no bucket {section.bucket!r}; create it first"
    return f"store.endpoint: {where} does not answer as S3 does: {text}"
