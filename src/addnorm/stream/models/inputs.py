"""Inputs for a model: drawn at random from what its configuration tells, made of texts, or read from a file."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.stream.models.hf import Refused, first_line, is_config

__all__ = ["BATCH", "TOKENS", "from_file", "generated", "in_words", "inputs_for", "tokenized"]

BATCH, TOKENS = 2, 16
LONGEST = 512  # tokens of a text that are read if nobody says more: attention needs memory with their square
PATIENCE = 5.0  # seconds after which no further kind of input is tried
# What a model may take besides its main input; tried in this order.
BESIDES: tuple[tuple[str, ...], ...] = (
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


def inputs_for(
    model: nn.Module,
    texts: Sequence[str] | None = None,
    folder: Path | None = None,
    *,
    seed: int = 0,
    tokens: int | None = None,
    batch: int | None = None,
) -> dict[str, Tensor]:
    """What the model is called with: the texts, with the tokenizer in the folder, or else what is drawn."""
    if texts is not None and folder is not None:
        return tokenized(model, texts, folder, tokens)
    return generated(model, seed, tokens or TOKENS, batch or BATCH)


# Drawn.


class _Draw:
    """One method for each name of an input: the shapes that models take under that name, the usual one first."""

    def __init__(self, model: nn.Module, seed: int, tokens: int, batch: int) -> None:
        self.model, self.batch, self.tokens = model, batch, tokens
        self.random = torch.Generator().manual_seed(seed)
        self.known: dict[str, Any] = {}
        self.special: set[int] = set()
        for name, value in _settings(model.config):
            self.known.setdefault(name, value)
            if name.endswith(("token_id", "token_index")):
                self.special.update(k for k in (value if isinstance(value, list) else [value]) if isinstance(k, int))

    def first(self, *names: str, otherwise: int) -> int:
        """The first of these settings that is a number above zero."""
        found = (self.known.get(name) for name in names)
        return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), otherwise)

    def ids(self, length: int) -> Tensor:
        """Numbers of tokens, none of them padding or otherwise special."""
        vocab = self.first("vocab_size", otherwise=256)
        allowed = torch.tensor([k for k in range(3, vocab) if k not in self.special] or [0])
        return allowed[torch.randint(len(allowed), (self.batch, length), generator=self.random)]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, generator=self.random).to(_dtype(self.model))

    def input_ids(self) -> Iterator[Tensor]:
        yield self.ids(self.tokens)

    def decoder_input_ids(self) -> Iterator[Tensor]:
        ids = self.ids(max(self.tokens // 2, 1))
        ids[:, 0] = _start(self.known)
        yield ids

    def bbox(self) -> Iterator[Tensor]:
        yield torch.tensor([0, 0, 8, 8]).expand(self.batch, self.tokens, 4).contiguous()
        yield self.floats(self.tokens, 8).abs()

    def pixel_values(self) -> Iterator[Tensor]:
        channels = self.first("num_channels", "in_channels", "in_chans", otherwise=3)
        size = self.known.get("image_size", 64)
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


def generated(model: nn.Module, seed: int = 0, tokens: int = TOKENS, batch: int = BATCH) -> dict[str, Tensor]:
    """The first inputs with which a transformers model runs; if there are none, raises what it raised first."""
    main = getattr(model, "main_input_name", "input_ids")
    takes = inspect.signature(model.forward).parameters
    drawn = [names for names in BESIDES if main not in names and all(name in takes for name in names)]
    if getattr(model.config, "is_encoder_decoder", False):
        drawn.sort(key=lambda names: "decoder_input_ids" not in names)
    if not (isinstance(main, str) and hasattr(_Draw, main)):
        raise Refused(f"inputs named {main!r} cannot be drawn at random")
    refusal: Exception | None = None
    until = time.monotonic() + PATIENCE
    for besides in drawn:
        draw = _Draw(model, seed, tokens, batch)
        names = (main, *besides)
        for tensors in product(*(getattr(draw, name)() for name in names)):
            found = dict(zip(names, tensors, strict=True))
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=()):
                    model(**found)
                return found
            except Exception as error:  # a model may raise anything at an input that is not for it
                refusal = refusal or error
            if time.monotonic() > until:
                break
    assert refusal is not None  # `()` is among those drawn
    raise refusal


def _settings(config: Any) -> Iterator[tuple[str, Any]]:
    """The settings of a configuration, under the names that all families share too, then those of the ones in it."""
    own = vars(config)
    yield from ((name, value) for name, value in own.items() if value is not None and not is_config(value))
    yield from ((name, own[key]) for name, key in (config.attribute_map or {}).items() if own.get(key) is not None)
    for value in own.values():
        if is_config(value):
            yield from _settings(value)


def _start(known: Mapping[str, Any]) -> int:
    """The token that a decoder begins with."""
    found = (known.get(name) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    return next((k for k in found if isinstance(k, int)), 0)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


# Texts.


def tokenized(model: nn.Module, texts: Sequence[str], folder: Path, tokens: int | None = None) -> dict[str, Tensor]:
    """The texts as the tokenizer in the folder reads them, padded to the longest, cut to what the model can take."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the bindings raise plain Exception
        raise Refused(f"'{path}' cannot be read as a tokenizer ({first_line(error)}): save it anew.") from None
    known: dict[str, Any] = {}
    for name, value in _settings(model.config):
        known.setdefault(name, value)
    longest = _longest(known, folder)
    if tokens is not None and longest is not None and tokens > longest:
        raise Refused(f"--tokens is {tokens}, expected at most {longest}: the model reads no more.")
    tokenizer.no_padding()  # what was saved pads to a fixed length
    tokenizer.enable_truncation(tokens or min(longest or LONGEST, LONGEST))
    read = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    empty = next((k for k, ids in enumerate(read) if not ids), None)
    if empty is not None:
        raise Refused(f"the text {texts[empty]!r} has no tokens, expected at least one.")
    pad = known.get("pad_token_id")
    pad = pad if isinstance(pad, int) and pad >= 0 else 0
    most = max(map(len, read))
    found = {
        "input_ids": torch.tensor([ids + [pad] * (most - len(ids)) for ids in read]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (most - len(ids)) for ids in read]),
    }
    vocab = known.get("vocab_size")
    largest = int(found["input_ids"].max())
    if isinstance(vocab, int) and largest >= vocab:
        raise Refused(
            f"'{path}' gives token {largest}, the model's vocabulary ends at {vocab - 1}: it is another model's."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        ids = found["input_ids"]
        found["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], _start(known)), ids[:, :-1]], 1)
    return found


def _longest(known: Mapping[str, Any], folder: Path) -> int | None:
    """How many tokens the model takes, where its files tell."""
    lengths = [known.get("max_position_embeddings")]
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):  # the file only tells more
        lengths.append(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("model_max_length"))
    return min((n for n in lengths if isinstance(n, int) and n > 0), default=None)


# A file's.


def from_file(path: Path, takes: Callable[..., Any]) -> dict[str, Tensor]:
    """The tensors of a file, by keyword, for a function that takes them."""
    found = _read(path)
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found):
        raise Refused(f"--input is '{path}', expected named tensors in it, one for each keyword that the model takes.")
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise Refused(f"--input is '{path}', in which {name} is {type(value).__name__}, expected a tensor.")
    parameters = inspect.signature(takes).parameters
    any_name = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in found:
        near = difflib.get_close_matches(name, [one for one in parameters if one not in found], 1, 0.8)
        if name not in parameters and (near or not any_name):  # many models ignore a name they do not know
            meant = f"; {near[0]} is near" if near else ""
            known = ", ".join([*parameters][:12])
            raise Refused(f"--input is '{path}', whose {name} the model does not take, expected one of {known}{meant}.")
    return found


def _read(path: Path) -> Any:
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no file"
        raise Refused(f"--input is '{path}', which is {what}, expected a .safetensors or .pt file of named tensors.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix in (".pt", ".pth", ".bin"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise Refused(f"--input is '{path}', which needs the package safetensors: pip install 'addnorm[hf]'.") from None
    except pickle.UnpicklingError:
        raise Refused(
            f"--input is '{path}', which holds something else than tensors, nothing of it was run: save a dict of tensors."
        ) from None
    except Exception as error:  # each format has errors of its own
        raise Refused(f"--input is '{path}', which cannot be read ({first_line(error)}): save it anew.") from None
    raise Refused(f"--input is '{path}', expected a file that ends in .safetensors or .pt.")


def in_words(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Inputs with their shapes and dtypes, for a sentence."""
    named = [*((f"argument {k}", value) for k, value in enumerate(args, 1)), *kwargs.items()]
    return ", ".join(f"{name} {_word(value)}" for name, value in named) or "no inputs"


def _word(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
