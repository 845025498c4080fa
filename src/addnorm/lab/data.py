"""The text that the lab's models learn: characters as numbers, in three parts, and the batches of a seed.

What it guarantees: a batch depends on the seed and the number of the step alone, so that every wiring is given the same ones,
and a run that is continued gets those that it would have had.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

__all__ = ["PARTS", "Part", "Text", "read", "topics"]

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
PIECES = 100  # the text is cut into so many, of which
VALIDATION, TEST = 4, 9  # these of every ten are held out: the subjects of a text change on the way


@dataclass(frozen=True)
class Text:
    """Characters for a language model.

    Every ten pieces of a hundredth of the text make: eight of training, one of validation (on which a learning rate is chosen),
    one of test (which is what is reported).

    Args:
        name: what it is called.
        text: the characters.

    Example:
        >>> from addnorm.lab import Text
        >>> text = Text("counting", "one two three four five six seven eight nine ten " * 100)
        >>> read, following = text.batch(seed=0, step=0, batch=2, tokens=8)
        >>> read.shape, bool((read[:, 1:] == following[:, :-1]).all())
        (torch.Size([2, 8]), True)
    """

    name: str
    text: str

    def __reduce__(self) -> tuple[type[Text], tuple[str, str]]:
        """As its characters alone: each job of a comparison is sent one, and what is computed of it is ten times as large."""
        return Text, (self.name, self.text)

    @cached_property
    def characters(self) -> str:
        """The different ones, in order: the number of a character is its place."""
        return "".join(sorted(set(self.text)))

    @cached_property
    def digest(self) -> str:
        """What tells this text from another."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @cached_property
    def numbers(self) -> dict[Part, Tensor]:
        """The three parts as numbers, `(characters,)` each, int64."""
        place = {character: k for k, character in enumerate(self.characters)}
        ids = torch.tensor([place[character] for character in self.text])
        pieces = ids.tensor_split(PIECES)
        which = {VALIDATION: "validation", TEST: "test"}
        return {
            part: torch.cat([piece for k, piece in enumerate(pieces) if which.get(k % 10, "train") == part])
            for part in PARTS
        }

    def batch(self, seed: int, step: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        """What is read and what follows each character of it, `(batch, tokens)` each, from random places of the training part."""
        # torch's generator takes 32 bits of a seed and forgets the others.
        of_both = hashlib.sha256(f"{seed}, {step}".encode()).digest()[:4]
        draws = torch.Generator().manual_seed(int.from_bytes(of_both))
        part = self.numbers["train"]
        return _at(part, torch.randint(len(part) - tokens, (batch,), generator=draws), tokens)

    def held_out(self, part: Part, sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The same from places of a part that are spread evenly over it: the same for every model."""
        of = self.numbers[part]
        last = len(of) - tokens - 1
        return _at(of, torch.linspace(0, last, min(sequences, last + 1), dtype=torch.float64).long(), tokens)

    @cached_property
    def entropy(self) -> float:
        """Nats a character, of a model that knows only how often each occurs: to reach no less is to have learned nothing."""
        counts = Counter(self.text)
        total = counts.total()
        return -sum(n / total * math.log(n / total) for n in counts.values())

    @property
    def uniform(self) -> float:
        """Nats a character, of a model that knows nothing at all; what is above it has diverged."""
        return math.log(len(self.characters))

    def fits(self, tokens: int) -> Text:
        """The text itself; ValueError if it has too few characters for sequences of so many."""
        shortest = min(map(len, self.numbers.values()))
        if shortest < tokens + 2:
            raise ValueError(
                f"text {self.name!r} has {len(self.text)} characters, {shortest} of them in its smallest part, expected at least "
                f"{tokens + 2} there for sequences of {tokens}: give a text of {(tokens + 3) * 10} characters or more."
            )
        if len(self.characters) < 2:
            raise ValueError(
                f"text {self.name!r} has one character only, expected a text in which there is something to learn."
            )
        return self


def _at(part: Tensor, starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    found = part[starts[:, None] + torch.arange(tokens + 1)]
    return found[:, :-1], found[:, 1:]


def topics() -> Text:
    """Python's documentation of its own language, which comes with it: `pydoc_data.topics`, some 465,000 characters."""
    from pydoc_data.topics import topics as found

    return Text("pydoc_data.topics", "\n".join(found[name] for name in sorted(found)))


def read(path: str | Path) -> Text:
    """The text of a UTF-8 file.

    Raises:
        ValueError: there is no such file, or it is no text.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"text is '{path}', expected a text file: there is no such file.") from None
    except IsADirectoryError:
        raise ValueError(f"text is '{path}', a directory, expected a text file.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text is '{path}', expected UTF-8, byte {error.start} is not: iconv -t UTF-8 converts it."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ValueError(f"text is {str(path)!r}, which cannot be read: {error}.") from None
    return Text(path.name, text)
