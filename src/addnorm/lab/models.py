"""The lab's model: a character language model whose weights depend only on its seed and its wiring."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from addnorm._util.norms import Norm
from addnorm.nn import Wiring
from addnorm.nn.transformer import Decoder
from addnorm.stream.dataflow.state import fork_rng


class CharLM(nn.Module):
    """Character language model: embeddings, a causal decoder without cross-attention, a linear head.

        x_0 = E[text] + P        y = stack(x_0)        logits = W y + b

    x_0 has variance one before training, as in the theory of the wirings. The wiring's own rule draws the sublayers' weights.
    Models of one shape and seed have the same embeddings and head. If their wirings have the same rule, all weights are the same.

    Args:
        characters: number of distinct characters.
        num_layers: number of layers, each an attention and a feed-forward sublayer.
        wiring: the wiring of the stack.
        d_model: width of the model.
        nhead: number of attention heads.
        tokens: maximum length of a sequence.
        norm: "layer" or "rms".
        seed: seed of the weights. The state of torch's global generator does not change.
        text: token ids, `(batch, tokens)`, for wirings whose factors are measured (admin).

    There are nine parameters, since each is a setting of a training run.

    Example:
        >>> from addnorm.lab.models import CharLM
        >>> model = CharLM(27, 2, addnorm.wirings.post_ln(), d_model=16, nhead=2, tokens=8)
        >>> model(torch.randint(27, (4, 8))).shape
        torch.Size([4, 8, 27])
    """

    def __init__(
        self, characters: int, num_layers: int,
        wiring: Wiring, *, d_model: int = 64, nhead: int = 4,
        tokens: int = 64, norm: Norm = "layer", seed: int = 0, text: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        with fork_rng():  # two threads that build models at once would share one generator
            torch.manual_seed(seed)
            self.embedding, self.position = nn.Embedding(characters, d_model), nn.Embedding(tokens, d_model)
            self.head = nn.Linear(d_model, characters)
            for table in (self.embedding, self.position):
                nn.init.normal_(table.weight, std=0.5**0.5)
            nn.init.xavier_uniform_(self.head.weight)
            nn.init.zeros_(self.head.bias)
            self.decoder = Decoder(num_layers, d_model, nhead, wiring=wiring, cross_attention=False, norm=norm)
            torch.manual_seed(seed + 2**31)  # the wiring's draws do not depend on how many numbers were drawn before
            if wiring.profile is None:
                wiring.init_(self.decoder)
            elif text is not None:
                wiring.init_(self.decoder, self.embed(text).detach())

    def embed(self, text: Tensor) -> Tensor:
        """Return x_0, `(batch, tokens, d_model)`, of token ids, `(batch, tokens)`."""
        return self.embedding(text) + self.position.weight[: text.shape[1]]  # type: ignore[no-any-return]  # torch does not type a module's call

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next character at every position, `(batch, tokens, characters)`."""
        return self.head(self.decoder(self.embed(text)))  # type: ignore[no-any-return]  # torch does not type a module's call
