"""Finished mid-trainings in the user's cache: a later run with the same inputs begins with RL.

An entry is a last save (`saves.py`). Its key digests everything that its bits depend on: corpora,
seed and settings, the weights it starts from, code, PyTorch, the processor and GPUs.
"""

import msgspec
import torch
import xxhash

from penstock.actors.runtime.products import ProductCache, source_digest
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.midtraining.midtrain import Midtrainer
from penstock.actors.trainer.midtraining.saves import SaveHead, encode_save, read_head
from penstock.kernels.cuda.launch import device_name
from penstock.kernels.native import processor

FOLDER = "midtrain"
_CODE = ("actors/policy", "actors/trainer", "kernels")


class FinishedCache:
    """The entry of one mid-training; without one where settings say so, or a clock is the budget.

    Args:
        settings: Of the trainer.
        purpose: As `saves.purpose_of` returns it.
        start_digest: Of the weights that it starts from.

    """

    def __init__(self, settings: TrainerConfig, purpose: str, start_digest: str) -> None:
        self._is_used = settings.midtrain.uses_cache and settings.midtrain.seconds == 0
        self._cache = ProductCache(FOLDER)
        place = "cpu" if settings.device == "cpu" else device_name()
        machine = [str(torch.__version__), place, settings.num_threads]
        facts = msgspec.json.encode([purpose, start_digest, source_digest(*_CODE), machine])
        self._key = xxhash.xxh3_128_hexdigest(facts + processor())

    def get(self) -> tuple[SaveHead, bytes] | None:
        """Return the last save, if an earlier run left it."""
        data = self._cache.get(self._key) if self._is_used else None
        return None if data is None else (read_head(data, self._key), data)

    def put(self, trainer: Midtrainer, head: SaveHead) -> None:
        """Keep a mid-training that is finished."""
        if self._is_used:
            self._cache.put(self._key, encode_save(trainer, head)[1])
