"""Inputs of a model: random according to its configuration, tokenized texts, or tensors of a file."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm._util.files import read_text
from addnorm._util.numbers import format_count
from addnorm.stream.dataflow.snapshot import preserve_state
from addnorm.stream.models.hf import ModelLoadError, first_line, iter_settings, load_tensors, read_settings

BATCH, TOKENS = 2, 16
MAX_TOKENS = 512  # default limit for texts: the memory of attention grows with the square of their length
TOKEN_INPUTS = frozenset(
    {"input_ids", "decoder_input_ids", "bbox"}
)  # random inputs whose length is the number of tokens
TIMEOUT = 5.0  # seconds after which no further kind of input is tried
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
# Names of further inputs besides the main one; tried in this order.
FURTHER_INPUTS: tuple[tuple[str, ...], ...] = (
    (),
    ("decoder_input_ids",),
    ("pixel_values",),
    ("input_ids",),
    ("bbox",),
    ("input_ids", "decoder_input_ids"),
    ("bbox", "decoder_input_ids"),
    ("input_features",),
    ("input_values",),
)


@dataclass
class _InputGenerator:
    """Generator of random inputs of a transformers model.

    The method with the name of an input yields tensors in the shapes that models accept, the usual shape first.
    """

    model: nn.Module
    seed: int
    tokens: int
    batch: int

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.settings = read_settings(self.model.config)
        self.special: set[int] = set()
        for name, value in iter_settings(self.model.config):
            if name.endswith(("token_id", "token_index")):
                self.special.update(k for k in (value if isinstance(value, list) else [value]) if isinstance(k, int))

    def first(self, *names: str, otherwise: int) -> int:
        """Return the first of the settings `names` that is a positive int; `otherwise` if none is."""
        values = (self.settings.get(name) for name in names)
        return next((n for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 0), otherwise)

    def ids(self, length: int) -> Tensor:
        """Return random token ids without padding and other special tokens."""
        vocab = self.first("vocab_size", otherwise=256)
        allowed = torch.tensor([k for k in range(3, vocab) if k not in self.special] or [0])
        return allowed[torch.randint(len(allowed), (self.batch, length), generator=self.random)]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, generator=self.random).to(_dtype(self.model))

    def input_ids(self) -> Iterator[Tensor]:
        yield self.ids(self.tokens)

    def decoder_input_ids(self) -> Iterator[Tensor]:
        ids = self.ids(max(self.tokens // 2, 1))
        ids[:, 0] = _start(self.settings)
        yield ids

    def bbox(self) -> Iterator[Tensor]:
        yield torch.tensor([0, 0, 8, 8]).expand(self.batch, self.tokens, 4).contiguous()
        yield self.floats(self.tokens, 8).abs()

    def pixel_values(self) -> Iterator[Tensor]:
        channels = self.first("num_channels", "in_channels", "in_chans", otherwise=3)
        size = self.settings.get("image_size", 64)
        if isinstance(size, dict):
            size = [*size.values()]
        sides = [*size][-2:] if isinstance(size, list | tuple) else [size, size]
        yield self.floats(channels, sides[0], sides[-1])
        yield self.floats(self.first("num_frames", "frames_per_clip", otherwise=4), channels, sides[0], sides[-1])
        yield self.floats(2, channels, 64, 64)

    pixel_values_videos = pixel_values

    def input_features(self) -> Iterator[Tensor]:
        names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim")
        bins = self.first(*names, otherwise=80)
        yield self.floats(bins, 2 * self.first("max_source_positions", otherwise=32))
        yield self.floats(64, bins)

    def input_values(self) -> Iterator[Tensor]:
        yield self.floats(3200)
        yield self.floats(1, 3200)
        yield self.floats(self.first("max_length", otherwise=64), self.first("num_mel_bins", otherwise=80))


def random_inputs(model: nn.Module, seed: int = 0, tokens: int = TOKENS, batch: int = BATCH) -> dict[str, Tensor]:
    """Return the first random inputs with which a transformers model runs.

    Raises:
        ModelLoadError: the model's main input has a name for which no input can be generated.
        Exception: the model's first error if it runs with none of the generated inputs.
    """
    main = getattr(model, "main_input_name", "input_ids")
    parameters = inspect.signature(model.forward).parameters
    candidates = [names for names in FURTHER_INPUTS if main not in names and all(name in parameters for name in names)]
    if getattr(model.config, "is_encoder_decoder", False):
        candidates.sort(key=lambda names: "decoder_input_ids" not in names)
    if not (isinstance(main, str) and hasattr(_InputGenerator, main)):
        raise ModelLoadError(f"inputs named {main!r} cannot be random")
    first_error: Exception | None = None
    until = time.monotonic() + TIMEOUT
    for further in candidates:
        generator = _InputGenerator(model, seed, tokens, batch)
        names = (main, *further)
        for tensors in product(*(getattr(generator, name)() for name in names)):
            inputs = dict(zip(names, tensors, strict=True))
            try:
                with torch.no_grad(), preserve_state(model, inputs):
                    model(**inputs)
                return inputs
            except Exception as error:  # a model may raise any type for a wrong input
                first_error = first_error or error
            if time.monotonic() > until:
                break
    assert first_error is not None  # `()` is among the candidates
    raise first_error


def estimate_bytes(model: nn.Module, tokens: int, batch: int) -> float:
    """Return a lower bound of the memory that the activations of a transformers model take while they are all kept."""
    generator = _InputGenerator(model, 0, tokens, batch)
    width = generator.first("hidden_size", "d_model", otherwise=1)
    layers = generator.first("num_hidden_layers", "num_layers", otherwise=1)
    masks = tokens if generator.first("num_attention_heads", otherwise=0) else 0
    return float(batch) * tokens * (layers * 8 * width * _dtype(model).itemsize + masks)


def token_limit(model: nn.Module, folder: Path | None = None) -> int | None:
    """Return the largest number of tokens that configuration and tokenizer allow; None if neither has a limit."""
    lengths = [read_settings(model.config).get("max_position_embeddings")]
    if folder is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):  # the file is optional
            lengths.append(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("model_max_length"))
    return min((n for n in lengths if isinstance(n, int) and n > 0), default=None)


def _start(settings: Mapping[str, Any]) -> int:
    """Return the token that a decoder begins with."""
    values = (settings.get(name) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    return next((k for k in values if isinstance(k, int)), 0)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def tokenize(model: nn.Module, texts: Sequence[str], folder: Path, tokens: int | None) -> dict[str, Tensor]:
    """Return the tokenized texts, padded to the longest and truncated to the model's limit.

    Args:
        model: the model.
        texts: the texts.
        folder: directory with the tokenizer.json.
        tokens: largest number of tokens of a text; None for the model's limit, at most `MAX_TOKENS`.

    Raises:
        ModelLoadError: the tokenizer cannot be read or does not fit the model, or a text has no token.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the bindings raise Exception itself
        raise ModelLoadError(f"'{path}' cannot be read as a tokenizer ({first_line(error)}): save it again.") from None
    settings = read_settings(model.config)
    limit = token_limit(model, folder)
    if tokens is not None and limit is not None and tokens > limit:
        raise ModelLoadError(f"--tokens is {tokens}, expected at most {limit}: the limit of the model.")
    special = tokenizer.num_special_tokens_to_add(False)
    if tokens is not None and tokens <= special:  # the tokenizer would then not truncate at all
        raise ModelLoadError(
            f"--tokens is {tokens}, expected at least {special + 1}: the tokenizer adds {format_count(special, 'special token')}."
        )
    tokenizer.enable_truncation(tokens or min(limit or MAX_TOKENS, MAX_TOKENS))
    pad = settings.get("pad_token_id")
    tokenizer.enable_padding(pad_id=pad if isinstance(pad, int) and pad >= 0 else 0)  # to the longest text
    rows = tokenizer.encode_batch(list(texts))
    empty = next((k for k, row in enumerate(rows) if not any(row.attention_mask)), None)
    if empty is not None:
        raise ModelLoadError(f"the text {texts[empty]!r} has no tokens, expected at least one.")
    inputs = {
        "input_ids": torch.tensor([row.ids for row in rows]),
        "attention_mask": torch.tensor([row.attention_mask for row in rows]),
    }
    vocab = settings.get("vocab_size")
    largest = int(inputs["input_ids"].max())
    if isinstance(vocab, int) and largest >= vocab:
        raise ModelLoadError(
            f"'{path}' gives token {largest}, the model's vocabulary ends at {vocab - 1}: use the tokenizer of this model."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        ids = inputs["input_ids"]
        inputs["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], _start(settings)), ids[:, :-1]], 1)
    return inputs


def read_texts(path: Path) -> tuple[str, ...]:
    """Return the lines of a UTF-8 file that are not blank.

    Raises:
        ModelLoadError: the file cannot be read or has no text.
    """
    try:
        lines = read_text(path, "--text").splitlines()
    except ValueError as error:
        raise ModelLoadError(error) from None
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise ModelLoadError(f"--text is '{path}', which has no text, expected one text a line.")
    return texts


def read_inputs(path: Path, function: Callable[..., Any]) -> dict[str, Tensor]:
    """Return the named tensors of a .safetensors or .pt file as keyword arguments for a function.

    Raises:
        ModelLoadError: the file cannot be read, holds more than named tensors, or a name is no parameter of the function.
    """
    inputs = _read_tensors(path)
    if not isinstance(inputs, dict) or not inputs or not all(isinstance(name, str) for name in inputs):
        raise ModelLoadError(
            f"--input is '{path}', expected a file of named tensors, one for each keyword argument of the model."
        )
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise ModelLoadError(f"--input is '{path}', in which {name} is {type(value).__name__}, expected a tensor.")
    parameters = inspect.signature(function).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in inputs:
        near = difflib.get_close_matches(
            name, [parameter for parameter in parameters if parameter not in inputs], 1, 0.8
        )
        if name not in parameters and (near or not any_name):  # many models accept any name and ignore it
            hint = f"; a similar name is {near[0]}" if near else ""
            names = ", ".join([*parameters][:12])
            raise ModelLoadError(
                f"--input is '{path}', whose {name} is no argument of the model, expected one of {names}{hint}."
            )
    return inputs


def _read_tensors(path: Path) -> Any:
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no file"
        raise ModelLoadError(
            f"--input is '{path}', which is {what}, expected a .safetensors or .pt file of named tensors."
        )
    try:
        if path.suffix in (".safetensors", ".pt", ".pth", ".bin"):
            return load_tensors(path)
    except ImportError:
        raise ModelLoadError(
            f"--input is '{path}', which needs the package safetensors: pip install 'addnorm[hf]'."
        ) from None
    except pickle.UnpicklingError as error:
        if "GLOBAL" not in str(error):
            raise ModelLoadError(
                f"--input is '{path}', expected a file that torch.save wrote: save it again."
            ) from None
        raise ModelLoadError(
            f"--input is '{path}', which holds more than tensors; its code was not run: save a dict of tensors."
        ) from None
    except Exception as error:  # each format raises other types
        raise ModelLoadError(
            f"--input is '{path}', which cannot be read ({first_line(error)}): save it again."
        ) from None
    raise ModelLoadError(f"--input is '{path}', expected a file that ends in .safetensors or .pt.")


def format_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the inputs with their shapes and dtypes, for use in a sentence."""
    named = [*((f"argument {k}", value) for k, value in enumerate(args, 1)), *kwargs.items()]
    return ", ".join(f"{name} {_describe(value)}" for name, value in named) or "no inputs"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
