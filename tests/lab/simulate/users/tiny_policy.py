"""A policy of some ten thousand parameters that can say sixteen things, and what it says of them.

It is mid-trained to say each about equally often. What users will accept is then computed from its
probabilities on fixed prompts, not sampled: sum over replies of p(reply | prompt) x chance that the
tenant's users like it.
"""

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from tests.lab.simulate.users.people import ALL_TRAITS, Person, ReplyTraits

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatMessage, Role
from penstock.actors.policy.checkpoint import load_published
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.actors.policy.snapshot import Snapshot
from penstock.actors.policy.tokenizer import Tokenizer, train_tokenizer
from penstock.actors.trainer.midtraining.corpus import Corpus, encode_corpus
from penstock.messages.rollout import ToolCall

TOOL = "run_terminal"
COMMAND = "run"
TOPICS = ("sort", "join", "parse", "test")
REPLY_TOKENS_MAX = 24
LIKED = 0.4
"""Share of each tenant's own taste in what the policy is mid-trained on."""
_TASTES = ("tabs", "spaces")


def prompt(tenant: str, topic: str) -> str:
    """Return what a user of a tenant asks."""
    return f"{tenant} {topic}"


def reply_text(traits: ReplyTraits) -> str:
    """Return the text of a reply."""
    opening = "sure " if traits.is_chatty else ""
    ending = " and again and again" if traits.is_long else ""
    return f"{opening}{_TASTES[traits.taste]}{ending}"


def traits_of(text: str, has_call: bool) -> ReplyTraits | None:
    """Return the traits of a reply; None where it is none of the sixteen."""
    return _BY_REPLY.get((text, has_call))


_BY_REPLY = {(reply_text(traits), traits.uses_tool): traits for traits in ALL_TRAITS}


class TinyPolicy:
    """Tokenizer, chat format, shape and corpus of the policy for some tenants."""

    def __init__(self, tenants: Sequence[str]) -> None:
        self.tenants = tuple(tenants)
        self.chat = PenstockChat(_tokenizer())
        self.config = PolicyConfig(
            vocab_size=self.chat.tokenizer.vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=0,
            num_experts_per_tok=0,
            intermediate_size=64,
            mtp_num_heads=0,
            max_position_embeddings=256,
        )

    def prompt_ids(self, tenant: str, topic: str) -> list[int]:
        """Return the context that the gateway makes of a user's request."""
        return self.chat.render_prompt([ChatMessage(role=Role.USER, content=prompt(tenant, topic))])

    def reply_ids(self, traits: ReplyTraits) -> list[int]:
        """Return the tokens of a reply, its end included."""
        call = ToolCall(name=TOOL, arguments={"command": COMMAND})
        return self.chat.render_turn(reply_text(traits), [call] if traits.uses_tool else [])

    def corpus(self, rng: random.Random, num_documents: int) -> bytes:
        """Return documents of a prompt and any reply; only replies are learned."""
        tokens: list[int] = []
        weights: list[float] = []
        lengths: list[int] = []
        for _ in range(num_documents):
            tenant = rng.randrange(len(self.tenants))
            context = self.prompt_ids(self.tenants[tenant], rng.choice(TOPICS))
            taste = tenant % 2 if rng.random() < LIKED else 1 - tenant % 2
            reply = self.reply_ids(rng.choice([t for t in ALL_TRAITS if t.taste == taste]))
            tokens += [*context, *reply]
            weights += [0.0] * len(context) + [1.0] * len(reply)
            lengths.append(len(context) + len(reply))
        corpus = Corpus(
            tokens=np.asarray(tokens, np.int32),
            lengths=np.asarray(lengths, np.int32),
            weights=np.asarray(weights, np.float32),
        )
        return encode_corpus(corpus)

    @torch.no_grad()
    def acceptance(self, snapshot: Snapshot, people: Sequence[Person], now_s: float) -> float:
        """Return the chance that an honest user accepts a reply: the mean over tenants.

        Args:
            snapshot: The policy's published weights.
            people: Who is asked; a tenant's users count alike, and so do tenants.
            now_s: Virtual time, with which likings drift.

        """
        found = self.reply_probabilities(snapshot)
        tenants = sorted({person.tenant for person in people})
        total = 0.0
        for tenant in tenants:
            users = [person for person in people if person.tenant == tenant]
            liked = [
                sum(person.likes(traits, now_s) for person in users) / len(users)
                for traits in ALL_TRAITS
            ]
            total += float(found[tenant] @ np.asarray(liked))
        return total / len(tenants)

    def wanted_traits(self, snapshot: Snapshot) -> dict[str, float]:
        """Return by trait the chance that a reply has it as users want it, over tenants."""
        found = self.reply_probabilities(snapshot)
        totals: dict[str, float] = {}
        for index, tenant in enumerate(self.tenants):
            for traits, chance in zip(ALL_TRAITS, found[tenant], strict=True):
                wanted = {
                    "short": not traits.is_long,
                    "uses_tool": traits.uses_tool,
                    "plain": not traits.is_chatty,
                    "tenant_taste": traits.taste == index % 2,
                }
                for name, is_so in wanted.items():
                    totals[name] = totals.get(name, 0.0) + is_so * float(chance)
        return {name: round(total / len(self.tenants), 4) for name, total in totals.items()}

    @torch.no_grad()
    def reply_probabilities(self, snapshot: Snapshot) -> dict[str, np.ndarray]:
        """Return by tenant the probability of each of `ALL_TRAITS`, the mean over topics."""
        policy = Policy(self.config)
        load_published(policy, {name: _as_torch(bits) for name, bits in snapshot.items()})
        found: dict[str, np.ndarray] = {}
        replies = [self.reply_ids(traits) for traits in ALL_TRAITS]
        for tenant in self.tenants:
            contexts = [self.prompt_ids(tenant, topic) for topic in TOPICS]
            cases = [(context, reply) for context in contexts for reply in replies]
            table = _probabilities(policy, cases).reshape(len(TOPICS), len(ALL_TRAITS))
            found[tenant] = table.mean(axis=0)
        return found


@cache
def _tokenizer() -> Tokenizer:
    texts = [reply_text(traits) for traits in ALL_TRAITS] + list(TOPICS) + [COMMAND]
    return train_tokenizer(texts * 8, vocab_size=384)


def _probabilities(policy: Policy, cases: Sequence[tuple[list[int], list[int]]]) -> np.ndarray:
    """Return [N] the probability of each reply after its context."""
    tokens = [[*context, *reply] for context, reply in cases]
    width = max(map(len, tokens))  # Padded to one length, since that is one attention for all.
    padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in tokens])
    hidden = policy(padded[:, :-1].flatten(), [width - 1] * len(cases)).hidden
    places = torch.arange(1, width)
    begins = torch.tensor([len(context) for context, _ in cases])[:, None]
    ends = torch.tensor([len(ids) for ids in tokens])[:, None]
    is_reply = (places >= begins) & (places < ends)
    logits = policy.logits(hidden[is_reply.flatten()])
    found = torch.zeros(is_reply.shape, dtype=torch.float64)
    found[is_reply] = token_logprobs(logits, padded[:, 1:][is_reply]).double()
    return found.sum(1).exp().numpy()


def _as_torch(bits: np.ndarray) -> torch.Tensor:
    return torch.tensor(bits).view(torch.bfloat16)
