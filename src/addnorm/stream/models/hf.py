"""Exception `ModelLoadError`, and helpers to use transformers without warnings, network and global random state."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from addnorm._util.optional import install_command


class ModelLoadError(ValueError):
    """Error for a model, files or inputs that cannot be used.

    The message is one sentence: argument, value, expectation, remedy.
    """


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, for use in a sentence; two lines if the first ends with ":".

    Example:
        >>> from addnorm.stream.models.hf import first_line
        >>> first_line(KeyError("gpt9")), first_line(ValueError())
        ("KeyError: 'gpt9'", 'ValueError')
    """
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".:")
    if isinstance(error, ModelLoadError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def require_hf(name: str) -> None:
    """Check that transformers and safetensors, which the model called `name` needs, can be imported.

    Raises:
        ModelLoadError: one of them is not installed.
    """
    for package in ("transformers", "safetensors"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise ModelLoadError(
                f"MODEL {name!r} needs the package {package}, which is not installed: {install_command(package)}."
            ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Turn off warnings, progress bars and network access of transformers inside the block."""
    if sys.modules.get("transformers") is None:  # the model of a factory may not need it
        yield
        return
    from huggingface_hub import constants
    from transformers import utils

    logging: Any = utils.logging  # parts of it have no types

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    offline = constants.HF_HUB_OFFLINE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        constants.HF_HUB_OFFLINE = True  # the environment variable of that name is only read at import
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = offline
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers inside the block; afterwards the generator has its earlier state."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


def is_config(value: Any) -> bool:
    """Return whether a setting is a configuration of transformers."""
    return hasattr(value, "to_diff_dict")


def iter_settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each setting of a configuration, then those of the configurations in it.

    A setting with a name that all model families share is yielded by this name too.
    """
    own = vars(config)
    yield from ((name, value) for name, value in own.items() if value is not None and not is_config(value))
    yield from ((name, own[key]) for name, key in (config.attribute_map or {}).items() if own.get(key) is not None)
    for value in own.values():
        if is_config(value):
            yield from iter_settings(value)


def read_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a configuration by name. If several have the same name, the outermost one is returned."""
    return dict(reversed([*iter_settings(config)]))


def load_tensors(path: Path) -> Any:
    """Return the content of a .safetensors file, or of a file of torch.save with tensors only."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
