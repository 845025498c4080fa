"""Text for a model to read: some sentences of our own, or a file's."""

from __future__ import annotations

from pathlib import Path

from addnorm.stream.models.hf import Refused

__all__ = ["SENTENCES", "read_texts"]

SENTENCES = (
    "Add and norm.",
    "A residual connection adds what a sublayer computed to what it was given.",
    "Layer normalization subtracts the mean of a token's features and divides by their standard deviation.",
    "Put after the sum, the norm keeps the stream at one scale; put before the sublayer, it lets the stream grow.",
    "The cat, which had been asleep on the warm windowsill since noon, opened one eye when the kettle began to sing.",
    "Attention lets every word look at every other word, weighs what it finds there, and brings home an average.",
    (
        "How deep can a network be before its gradients no longer tell the first layers anything useful? With identity "
        "connections from bottom to top, the answer turned out to be: very deep, hundreds of layers and more."
    ),
    (
        "In 1854 the physician John Snow marked the cholera deaths of one London quarter on a map, saw that they lay around a "
        "single water pump in Broad Street, and had its handle removed; the epidemic, which was ebbing already, soon ended."
    ),
)


def read_texts(path: Path) -> tuple[str, ...]:
    """The lines of a UTF-8 file that are not blank, a text each."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise Refused(f"--text is '{path}', expected a text file: there is no such file.") from None
    except IsADirectoryError:
        raise Refused(f"--text is '{path}', a directory, expected a text file: one text a line.") from None
    except UnicodeDecodeError as error:
        raise Refused(
            f"--text is '{path}', expected UTF-8, byte {error.start} is not: iconv -t UTF-8 converts it."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise Refused(f"--text is {str(path)!r}, which cannot be read: {error}.") from None
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise Refused(f"--text is '{path}', which has no text in it, expected one text a line.")
    return texts
