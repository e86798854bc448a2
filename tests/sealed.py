"""Users' turns as the log holds them, for tests that make records themselves."""

import msgspec

from penstock.actors.runtime.vault import Vault
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.reading.sealed import SealedTurn
from penstock.messages.rollout import Turn

MASTER_KEY = bytes(32)


def open_vault() -> Vault:
    """Return a vault that opens what `sealed_turn` made, whatever its store."""
    return Vault(MemoryStore(), MASTER_KEY)


def sealed_turn(turn: Turn, request_id: str) -> SealedTurn:
    """Return a turn as the record of its request has it."""
    sealed = open_vault().seal_for_later(request_id, msgspec.msgpack.encode(turn))
    return SealedTurn(summary=turn.summary, sealed=sealed)
