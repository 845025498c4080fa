"""The lab's model: a character language model around a `ResidualStack`, whose weights are those of its seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from addnorm.nn import Wiring
from addnorm.nn.norm import NormKind
from addnorm.nn.transformer import Decoder
from addnorm.stream.dataflow.state import fork_rng

__all__ = ["CharLM"]


class CharLM(nn.Module):
    """Embeddings of characters and positions, a causal decoder without cross-attention under a wiring, a head.

        x_0 = E[text] + P        y = stack(x_0)        logits = W y + b

    x_0 has variance one before training, as the theory of the wirings has it. The sublayers' weights are drawn by the wiring's
    own rule, all from the seed: models of one shape have the same embeddings and head, and under wirings with the same rule the
    same weights throughout.

    Args:
        characters: how many there are.
        num_layers: each an attention and a feed-forward block.
        wiring: of the stack.
        d_model: the width.
        nhead: of the attention.
        dim_feedforward: the width inside the feed-forward; None is `4 * d_model`.
        tokens: the longest sequence.
        norm: "layer" or "rms".
        seed: of the weights. Nobody else's random numbers are drawn.
        text: `(batch, tokens)`, for wirings whose factors are measured (admin).

    Example:
        >>> from addnorm.lab.models import CharLM
        >>> model = CharLM(27, 2, addnorm.wirings.post_ln(), d_model=16, nhead=2, tokens=8)
        >>> model(torch.randint(27, (4, 8))).shape
        torch.Size([4, 8, 27])
    """

    def __init__(
        self, characters: int, num_layers: int,
        wiring: Wiring, *, d_model: int = 64, nhead: int = 4, dim_feedforward: int | None = None,
        tokens: int = 64, norm: NormKind = "layer", seed: int = 0, text: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        with fork_rng():  # of two models made in two threads each would get some of the other's numbers
            torch.manual_seed(seed)
            self.embedding, self.position = nn.Embedding(characters, d_model), nn.Embedding(tokens, d_model)
            self.head = nn.Linear(d_model, characters)
            for table in (self.embedding, self.position):
                nn.init.normal_(table.weight, std=0.5**0.5)
            nn.init.xavier_uniform_(self.head.weight)
            nn.init.zeros_(self.head.bias)
            self.decoder = Decoder(
                num_layers, d_model, nhead, dim_feedforward, wiring, cross_attention=False, norm=norm
            )
            torch.manual_seed(seed + 2**31)  # what is drawn from here on does not depend on what was drawn before
            if wiring.profile is None:
                wiring.init_(self.decoder)
            elif text is not None:
                wiring.init_(self.decoder, self.embed(text).detach())

    def embed(self, text: Tensor) -> Tensor:
        """x_0, `(batch, tokens, d_model)`."""
        return self.embedding(text) + self.position.weight[: text.shape[1]]  # type: ignore[no-any-return]  # torch does not type a module's call

    def forward(self, text: Tensor) -> Tensor:
        """The logits of what follows each character, `(batch, tokens, characters)`."""
        return self.head(self.decoder(self.embed(text)))  # type: ignore[no-any-return]  # torch does not type a module's call
