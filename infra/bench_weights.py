"""Delta codecs on weights that were really trained, in one run with the usual way.

A small policy is trained on the standard library's source, then takes policy-gradient-like steps at
several learning rates; each pair of neighboring bfloat16 snapshots goes through every codec.
"""

import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import zstandard

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.kernels import delta
from penstock.kernels.delta import Codec
from penstock.kernels.delta.classes import exponent_keys
from penstock.kernels.delta.ulp import ordered

LEARNING_RATES = (1e-6, 3e-6, 1e-5, 3e-5)
_CONFIG = PolicyConfig(vocab_size=256, hidden_size=256, moe_intermediate_size=256, mtp_num_heads=0)
_NUM_SEQUENCES, _SEQUENCE_TOKENS = 8, 128
_NUM_PRETRAIN_STEPS, _NUM_WARM_STEPS = 60, 8
_NUM_TIMINGS = 3
Pair = tuple[np.ndarray, np.ndarray]
_Batches = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def bench_weights() -> dict[str, dict[str, object]]:
    """Measure ratio and speed of the codecs.

    Returns:
        By learning rate: `changed_fraction`, `entropy_bound_ratio` (mask and step given the base's
        exponent), `num_bytes` of the full snapshot, and `codecs`: by name `ratio`, `encode_gb_s`,
        `decode_gb_s` (bytes of the full snapshot), `bit_exact`.

    """
    return {f"{rate:g}": _measure(*pair) for rate, pair in trained_pairs().items()}


def trained_pairs(seed: int = 0) -> dict[float, Pair]:
    """Train, and return by learning rate two neighboring flat snapshots [N] uint16."""
    policy = Policy(_CONFIG, seed=seed)
    batches = _batches(seed)
    _train(policy, batches, 1e-3, _NUM_PRETRAIN_STEPS, is_reinforced=False)
    trained = {name: value.clone() for name, value in policy.state_dict().items()}
    pairs: dict[float, Pair] = {}
    for rate in LEARNING_RATES:
        policy.load_state_dict(trained)
        pairs[rate] = _train(policy, batches, rate, _NUM_WARM_STEPS, is_reinforced=True)
    return pairs


def _batches(seed: int) -> _Batches:
    """Return a source of token ids [S, T + 1], bytes of real code, and of advantages [S]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        high = len(tokens) - _SEQUENCE_TOKENS - 1
        starts = torch.randint(0, high, (_NUM_SEQUENCES,), generator=generator)
        places = starts[:, None] + torch.arange(_SEQUENCE_TOKENS + 1)
        return tokens[places], torch.randn(_NUM_SEQUENCES, generator=generator)

    return draw


def _train(
    policy: Policy,
    batches: _Batches,
    rate: float,
    num_steps: int,
    *,
    is_reinforced: bool,
) -> Pair:
    """Take steps; return the snapshots before and after the last."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate, betas=(0.9, 0.95))
    before = after = _flat(policy)
    for _ in range(num_steps):
        batch, advantages = batches()
        output = policy(batch[:, :-1].reshape(-1), [_SEQUENCE_TOKENS] * _NUM_SEQUENCES)
        logits = policy.logits(output.hidden)
        losses = F.cross_entropy(logits, batch[:, 1:].reshape(-1), reduction="none")
        losses = losses.view(_NUM_SEQUENCES, -1).mean(1)
        weights = advantages if is_reinforced else torch.ones(_NUM_SEQUENCES)
        optimizer.zero_grad()
        (losses * weights).mean().backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        before, after = after, _flat(policy)
    return before, after


def _flat(policy: Policy) -> np.ndarray:
    state = publishable_state(policy)
    return np.concatenate([as_numpy(state[name]).reshape(-1) for name in sorted(state)])


def _measure(base: np.ndarray, target: np.ndarray) -> dict[str, object]:
    codecs = {
        codec.name.lower(): _time(
            base, target, lambda codec=codec: delta.encode_with(codec, base, target), _apply
        )
        for codec in (Codec.GAP_ULP, Codec.CLASS_GAP_ULP)
    }
    codecs["ladder"] = _time(base, target, lambda: delta.encode(base, target), _apply)
    codecs["xor_zstd"] = _time(base, target, lambda: _xor_encode(base, target), _xor_apply)
    return {
        "num_bytes": base.nbytes,
        "changed_fraction": int(np.count_nonzero(base != target)) / base.size,
        "entropy_bound_ratio": base.nbytes / entropy_bound_bytes(base, target),
        "codecs": codecs,
    }


def _time(
    base: np.ndarray,
    target: np.ndarray,
    encode: Callable[[], bytes],
    apply: Callable[[np.ndarray, bytes], np.ndarray],
) -> dict[str, float | bool]:
    payload = encode()
    encode_s = min(_seconds(encode) for _ in range(_NUM_TIMINGS))
    decode_s = min(_seconds(lambda: apply(base, payload)) for _ in range(_NUM_TIMINGS))
    return {
        "ratio": base.nbytes / len(payload),
        "encode_gb_s": base.nbytes / encode_s / 1e9,
        "decode_gb_s": base.nbytes / decode_s / 1e9,
        "bit_exact": bool(np.array_equal(apply(base, payload), target)),
    }


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread: what others do on the machine does not count."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _apply(base: np.ndarray, payload: bytes) -> np.ndarray:
    patch = delta.decode(base, payload)
    target = base.copy()
    target[patch.flat_indices] = patch.values
    return target


def _xor_encode(base: np.ndarray, target: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress((base ^ target).data)


def _xor_apply(base: np.ndarray, payload: bytes) -> np.ndarray:
    return base ^ np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), base.dtype)


def entropy_bound_bytes(base: np.ndarray, target: np.ndarray) -> float:
    """Return the entropy of the mask and of the step, each given the base's exponent, in bytes."""
    keys = exponent_keys(base)
    step = (ordered(target) - ordered(base)).view(np.int16)
    bits = 0.0
    for key in np.unique(keys):
        _, counts = np.unique(step[keys == key], return_counts=True)
        bits -= float(np.sum(counts * np.log2(counts / counts.sum())))
    return bits / 8
