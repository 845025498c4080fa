"""What the files here share: refusing in a sentence, and transformers kept quiet, offline and seeded."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Refused", "first_line", "is_config", "need_hf", "quiet", "seeded"]


class Refused(ValueError):
    """What came cannot be used; the text is one sentence: what came, what was expected, what to do."""


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says, to be put into a sentence; two where the first announces one."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".:")
    if isinstance(error, Refused):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def need_hf(name: str) -> None:
    """Refuses a model that transformers and safetensors are needed for if one of them is not installed."""
    for package in ("transformers", "safetensors"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise Refused(
                f"MODEL {name!r} needs the package {package}, which is not installed: pip install 'addnorm[hf]'."
            ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Transformers without its warnings and progress bars, and without the network; as it was, afterwards."""
    if sys.modules.get("transformers") is None:  # a factory's model has no need of it
        yield
        return
    from huggingface_hub import constants
    from transformers import utils

    logging: Any = utils.logging  # some of it has no types

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    offline = constants.HF_HUB_OFFLINE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        constants.HF_HUB_OFFLINE = True  # what the variable of that name sets, which was read at the import
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = offline
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of their own; the caller's go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


def is_config(value: Any) -> bool:
    """Whether it is a configuration, inside of another one."""
    return hasattr(value, "to_diff_dict")
