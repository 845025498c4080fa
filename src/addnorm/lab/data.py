"""Text for the lab's character models: token ids in three parts, and the batches of a seed.

A batch depends only on the seed and the step. Every wiring gets the same batches, and a continued run gets the batches that an
uninterrupted run would have got.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from addnorm._util import files

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
PIECES = 100  # pieces that the text is cut into
VALIDATION, TEST = 4, 9  # the held-out pieces of every ten; spread, since the subject of a text changes


@dataclass(frozen=True)
class Text:
    """Characters for a language model, split into a training, a validation and a test part.

    The text is cut into 100 pieces. Of every ten, eight are for training, one is for validation (to choose a learning rate) and
    one for test (the reported loss).

    Args:
        name: name of the text.
        text: the characters.

    Example:
        >>> from addnorm.lab import Text
        >>> text = Text("counting", "one two three four five six seven eight nine ten " * 100)
        >>> inputs, targets = text.batch(seed=0, step=0, batch=2, tokens=8)
        >>> inputs.shape, bool((inputs[:, 1:] == targets[:, :-1]).all())
        (torch.Size([2, 8]), True)
    """

    name: str
    text: str

    def __reduce__(self) -> tuple[type[Text], tuple[str, str]]:
        """Pickle the characters only: every job gets a text, and the cached tensors are ten times as large."""
        return Text, (self.name, self.text)

    @cached_property
    def characters(self) -> str:
        """The distinct characters, sorted. The id of a character is its index here."""
        return "".join(sorted(set(self.text)))

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @cached_property
    def ids(self) -> dict[Part, Tensor]:
        """Token ids of the three parts, each `(characters,)` and int64."""
        index = {character: k for k, character in enumerate(self.characters)}
        pieces = torch.tensor([index[character] for character in self.text]).tensor_split(PIECES)
        held_out = {VALIDATION: "validation", TEST: "test"}
        return {
            part: torch.cat([piece for k, piece in enumerate(pieces) if held_out.get(k % 10, "train") == part])
            for part in PARTS
        }

    def batch(self, seed: int, step: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return inputs and next characters, `(batch, tokens)` each, from random positions of the training part."""
        # torch's generator uses only 32 bits of a seed.
        of_both = hashlib.sha256(f"{seed}, {step}".encode()).digest()[:4]
        generator = torch.Generator().manual_seed(int.from_bytes(of_both))
        part = self.ids["train"]
        return _sequences(part, torch.randint(len(part) - tokens, (batch,), generator=generator), tokens)

    def held_out(self, part: Part, sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return inputs and next characters, `(sequences, tokens)` each, from evenly spaced positions of a part."""
        ids = self.ids[part]
        last = len(ids) - tokens - 1
        return _sequences(ids, torch.linspace(0, last, min(sequences, last + 1), dtype=torch.float64).long(), tokens)

    @cached_property
    def entropy(self) -> float:
        """Entropy of the single characters in nats: the loss of a model that knows only their frequencies."""
        counts = Counter(self.text)
        total = counts.total()
        return -sum(n / total * math.log(n / total) for n in counts.values())

    @property
    def uniform(self) -> float:
        """Loss of a uniform guess in nats a character. A model well above it has diverged."""
        return math.log(len(self.characters))

    def describe(self) -> dict[str, Any]:
        """Return the text's metadata as JSON types: name, sizes, digest, and the losses of two guesses that ignore context."""
        return {
            "name": self.name, "characters": len(self.text), "symbols": len(self.characters), "digest": self.digest,
            "entropy": self.entropy, "uniform": self.uniform,
        }  # fmt: skip

    def require_length(self, tokens: int) -> Text:
        """Return the text itself if every part is long enough for sequences of `tokens` characters.

        Raises:
            ValueError: the text is too short, or has only one distinct character.
        """
        shortest = min(map(len, self.ids.values()))
        if shortest < tokens + 2:
            raise ValueError(
                f"text {self.name!r} has {len(self.text)} characters, {shortest} of them in its smallest part, expected at least "
                f"{tokens + 2} there for sequences of {tokens}: use a text of {(tokens + 3) * 10} characters or more."
            )
        if len(self.characters) < 2:
            raise ValueError(
                f"text {self.name!r} has only one distinct character, expected at least two: there is nothing to learn."
            )
        return self


def _sequences(ids: Tensor, starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequences of `tokens` ids that begin at `starts`, and the same sequences shifted by one character."""
    rows = ids[starts[:, None] + torch.arange(tokens + 1)]
    return rows[:, :-1], rows[:, 1:]


def python_docs() -> Text:
    """Return Python's language documentation, which comes with Python: `pydoc_data.topics`, about 465,000 characters.

    Example:
        >>> from addnorm.lab import python_docs
        >>> text = python_docs()
        >>> text.name
        'pydoc_data.topics'
    """
    from pydoc_data.topics import topics

    return Text("pydoc_data.topics", "\n".join(topics[name] for name in sorted(topics)))


def read_text(path: str | Path) -> Text:
    """Read a UTF-8 file as a text.

    Raises:
        ValueError: the file does not exist, cannot be read, or is not UTF-8.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from addnorm.lab import read_text
        >>> path = Path(tempfile.mkdtemp(), "poem.txt")
        >>> _ = path.write_text("a b a b c " * 400)
        >>> read_text(path).name
        'poem.txt'
    """
    return Text(Path(path).name, files.read_text(path, "text"))
