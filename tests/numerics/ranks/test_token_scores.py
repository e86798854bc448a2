"""Log-probabilities and entropies in chunks, against one product of all tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.actors.trainer.distribution import TurnDraw
from penstock.actors.trainer.objective.token_scores import drawn_rows, token_scores
from penstock.messages.task import Sampling

NUM, WIDTH, VOCABULARY = 41, 12, 50


class Head:
    """What `token_scores` asks of a policy."""

    def __init__(self, num_logits_max, dtype=torch.float32, vocabulary=VOCABULARY):
        torch.manual_seed(1)
        self.weight = torch.randn(vocabulary, WIDTH, dtype=dtype).requires_grad_()
        self.num_logits_max = num_logits_max
        self.config = SimpleNamespace(vocab_size=vocabulary)

    def logits(self, hidden):
        return F.linear(hidden, self.weight)

    def head_weights(self):
        return [self.weight]


def draws():
    """Three turns of one sequence: plain, cut by top-p, and with penalties."""
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, VOCABULARY, 80)
    support = rng.integers(1, 256, (15, -(-VOCABULARY // 8)), dtype=np.uint8)
    samplings = (
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_p=0.9),
        Sampling(
            temperature=1.0, presence_penalty=0.4, repetition_penalty=1.2, logit_bias={3: 1.0}
        ),
    )
    found = []
    for sampling, start, num in zip(samplings, (5, 20, 50), (12, 15, 14), strict=True):
        at = np.arange(num)
        own = support if sampling.is_truncated else None
        if own is not None:
            chosen = token_ids[start + at]
            own[at, chosen // 8] |= (1 << (chosen % 8)).astype(np.uint8)
        found.append((token_ids, TurnDraw(sampling=sampling, start=start, at=at, support=own)))
    targets = np.concatenate([token_ids[d.start + d.at] for _, d in found])
    return found, torch.from_numpy(targets)


def hidden(dtype=torch.float32, num=NUM):
    torch.manual_seed(2)
    return torch.randn(num, WIDTH, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("num_rows", [1, 7, 13, NUM - 1])
def test_chunks_give_what_the_whole_gives(num_rows, entropy):
    drawn, targets = draws()
    found = []
    for at_once in (NUM, num_rows):
        head, states = Head(at_once * VOCABULARY), hidden()
        scores = token_scores(head, states, targets, drawn, entropy)
        loss = (scores.logprobs * torch.linspace(-1, 1, NUM)).sum()
        assert scores.entropies.requires_grad == (entropy == "gradient")
        if entropy == "gradient":
            loss = loss + (scores.entropies * torch.linspace(2, 0, NUM)).sum()
        gradients = torch.autograd.grad(loss, [states, head.weight])
        found.append([scores.logprobs, scores.entropies, *gradients])
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_differences():
    """Few numbers: each of them is moved by itself."""
    vocabulary, num = 7, 6

    def compute(states, weight):
        head = Head(4 * vocabulary, vocabulary=vocabulary)
        head.weight = weight
        return token_scores(head, states, torch.arange(num), None, "gradient")

    states = hidden(torch.float64, num)
    weight = Head(1, torch.float64, vocabulary).weight
    # Scores are float32: coarse steps, and bounds to match.
    assert torch.autograd.gradcheck(compute, (states, weight), eps=1e-2, atol=2e-3, rtol=2e-2)


def test_drawn_rows_are_those_of_the_whole():
    drawn, _ = draws()
    cut = [draw for start in range(0, NUM, 9) for _, draw in drawn_rows(drawn, start, start + 9)]
    whole = [draw for _, draw in drawn]
    assert (
        np.concatenate([c.at for c in cut]).tolist()
        == np.concatenate([w.at for w in whole]).tolist()
    )
    assert np.array_equal(
        np.concatenate([c.support for c in cut if c.support is not None]), whole[1].support
    )


class Live(TorchDispatchMode):
    """The most elements of logits-sized tensors that were there at once."""

    def __init__(self, smallest):
        super().__init__()
        self.smallest, self.now, self.most = smallest, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        import weakref

        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            is_view = isinstance(each, torch.Tensor) and any(
                isinstance(a, torch.Tensor)
                and a.untyped_storage().data_ptr() == each.untyped_storage().data_ptr()
                for a in args
            )
            if isinstance(each, torch.Tensor) and each.numel() >= self.smallest and not is_view:
                self.now += each.numel()
                self.most = max(self.most, self.now)
                weakref.finalize(each, self._freed, each.numel())
        return out

    def _freed(self, num):
        self.now -= num


def test_the_peak_falls_with_the_number_of_chunks():
    vocabulary, num = 4096, 256
    targets = torch.randint(0, vocabulary, (num,))
    peaks = []
    for num_chunks in (1, 4, 16):
        head = Head(num * vocabulary // num_chunks, vocabulary=vocabulary)
        states = hidden(num=num)
        with Live(smallest=vocabulary * 16) as live:
            token_scores(head, states, targets, None, "gradient").logprobs.sum().backward()
        peaks.append(live.most)
    assert peaks[1] <= peaks[0] / 3
    assert peaks[2] <= peaks[0] / 8
