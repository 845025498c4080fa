"""A character model of Python's own documentation, small enough to train in seconds: what only training shows.

The text is `pydoc_data.topics`, which comes with Python. All is drawn from a seed; the learning rate is constant, but for a
warm-up.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm.lab.toy import Passed, Wired, passed
from addnorm.nn import ResidualStack

__all__ = ["Attention", "TinyLM", "characters", "unigram_entropy"]


@cache
def characters() -> Tensor:
    """The text as numbers below 128; what is no ASCII is 0."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([byte if byte < 128 else 0 for byte in text.encode("ascii", "replace")])


def unigram_entropy() -> float:
    """Nats a character, of a model that knows only how often each occurs: what a stack that learned nothing reaches."""
    counts = Counter(characters().tolist())
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values())


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, d: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def weight_roles(self) -> list[tuple[str, Tensor]]:
        """For init rules that depend on the role."""
        return [*zip(("query", "key", "value"), self.qkv.weight.chunk(3), strict=True), ("out", self.out.weight)]

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, n, d)` to the same shape."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # torch does not type a module's call


class TinyLM(nn.Module):
    """Embeddings, a `ResidualStack`, a head; weights by the wiring's own rule.

    Args:
        n_layers: each an attention and a feed-forward block of 4d.
        wiring: of the stack.
        seed: of weights and batches.
        d: the width.
        tokens: in a sequence.
        batch: sequences in a step.
    """

    def __init__(
        self, n_layers: int, wiring: Wired, seed: int, *, d: int = 64, tokens: int = 32, batch: int = 8
    ) -> None:
        super().__init__()
        self.tokens, self.batch = tokens, batch
        self.draws = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.embedding, self.position = nn.Embedding(128, d), nn.Embedding(tokens, d)
            sublayers: list[nn.Module] = []
            for _ in range(n_layers):
                sublayers += [
                    Attention(d),
                    nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d)),
                ]
            self.stack = ResidualStack(sublayers, d, wiring)
            self.stack.wiring.init_(self.stack)
            self.head = nn.Linear(d, 128)

    def texts(self, n: int, draws: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """n sequences from random places, and what follows each of their characters."""
        text = characters()
        starts = torch.randint(len(text) - self.tokens, (n, 1), generator=draws or self.draws)
        found = text[starts + torch.arange(self.tokens + 1)]
        return found[:, :-1], found[:, 1:]

    def embed(self, text: Tensor) -> Tensor:
        """x_0."""
        x: Tensor = self.embedding(text) + self.position.weight
        return x

    def judge(self, y: Tensor, following: Tensor) -> Tensor:
        """The loss of what the stack returned, in nats a character."""
        return F.cross_entropy(self.head(y).flatten(0, 1), following.flatten())

    def fit(self, steps: int, lr: float, warm_up: int = 0) -> TinyLM:
        """Adam; the learning rate rises over the first `warm_up` steps, then stays."""
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warm_up + 1)))
        for _ in range(steps):
            text, following = self.texts(self.batch)
            loss = self.judge(self.stack(self.embed(text)), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return self

    @torch.no_grad()
    def held_out(self, stack: ResidualStack | None = None, sequences: int = 256) -> float:
        """The loss on other places of the text, the same for all models; of another stack in its place, if given."""
        text, following = self.texts(sequences, torch.Generator().manual_seed(-1))
        return float(self.judge((stack or self.stack)(self.embed(text)), following))

    def passed(self, *, residual_alone: bool = False) -> Passed:
        """The stream and its gradient at every sublayer, on one batch that is the same for all models."""
        text, following = self.texts(32, torch.Generator().manual_seed(-2))

        def loss(y: Tensor) -> Tensor:
            return self.judge(y, following)

        return passed(self.stack, self.embed(text), loss, residual_alone=residual_alone)
