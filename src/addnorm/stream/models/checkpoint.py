"""Models from a directory in Hugging Face's format, read without running code of the directory and without the network."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from addnorm._util.numbers import format_count
from addnorm.stream.models.hf import ModelLoadError, first_line, load_tensors, quiet, seeded
from addnorm.stream.models.tiny_model import model_class

# Settings that name code, in the directory or on the hub. They are ignored.
CODE = {
    "auto_map", "custom_pipelines", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
}  # fmt: skip
OPTIONAL = "pooler"  # module after the last layer, not part of the stream; many files have no weights for it
LISTED = 3  # number of weights that a message names


def from_directory(folder: Path) -> tuple[nn.Module, str]:
    """Return the model of a directory, without a head and in eval mode, and the name of its weights file.

    Raises:
        ModelLoadError: the directory holds no such model, or files that do not fit each other.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = _settings(folder)
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        reason = "expected a model type of transformers"
        if "auto_map" in settings:
            reason = (
                "which needs code of that directory, and no model's code is run: expected a model type of transformers"
            )
        raise ModelLoadError(f"'{folder}' has a config.json with model_type {kind!r}, {reason}.")
    if settings.get("quantization_config"):
        raise ModelLoadError(
            f"'{folder}' holds quantized weights, expected floating-point weights: use the original model."
        )
    config_class = CONFIG_MAPPING[kind]
    hf_class = model_class(config_class)
    if hf_class is None:
        raise ModelLoadError(f"'{folder}' has model_type {kind!r}, for which transformers has no model without a head.")
    weights, file = _weights(folder)
    try:
        with quiet(), seeded(0):
            config = config_class.from_dict(_without_code(settings))
            model, report = hf_class.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below in one message
                local_files_only=True,
                trust_remote_code=False,
            )
    except Exception as error:  # transformers raises any type
        raise ModelLoadError(f"'{folder}' cannot be made into a {kind} model: {first_line(error)}.") from error
    _check(folder, file, model, report)
    return model.eval(), file


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"'{folder}' has no config.json, expected a directory as written by `save_pretrained` or `hf download --local-dir`."
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"'{path}' cannot be read as JSON ({first_line(error)}): download it again.") from None
    if not isinstance(settings, dict):
        raise ModelLoadError(
            f"'{path}' holds a {type(settings).__name__}, expected an object with the model's settings."
        )
    return settings


def _without_code(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {name: _without_code(value) for name, value in settings.items() if name not in CODE}
    return settings


def _weights(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Return the weights of a directory, and the name of their file or index. Safetensors files come first."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = f"{name}.index.json"
        if (folder / name).is_file():
            return _tensors(folder / name), name
        if (folder / index).is_file():
            weights = {}
            for shard in _shards(folder / index):
                weights.update(_tensors(folder / shard))
            return weights, index
    raise ModelLoadError(
        f"'{folder}' has no weights, expected model.safetensors, its parts with an index, or pytorch_model.bin."
    )


def _shards(index: Path) -> Iterable[str]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"'{index}' cannot be read as an index of weights ({first_line(error)}): download it again."
        ) from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelLoadError(f"'{index}' names the file {shard!r}, expected files in the same directory.")
        if not (index.parent / shard).is_file():
            raise ModelLoadError(f"'{index}' names the file {shard!r}, which does not exist: download it too.")
    return shards


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_tensors(path)
    except pickle.UnpicklingError:
        raise ModelLoadError(
            f"'{path}' holds more than tensors; its code was not run: save the model as model.safetensors."
        ) from None
    except Exception as error:  # each format raises other types
        raise ModelLoadError(
            f"'{path}' cannot be read, it is corrupt or truncated ({first_line(error)}): download it again."
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ModelLoadError(f"'{path}' holds no named tensors, expected a model's state_dict.")
    return tensors


def _check(folder: Path, file: str, model: nn.Module, report: dict[str, Any]) -> None:
    """Check that the weights are those of the configured model. Further weights of a head are allowed."""
    missing = sorted(name for name in report["missing_keys"] if OPTIONAL not in name.split("."))
    other = sorted({str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"]})
    more = sorted(name for name in report["unexpected_keys"] if _is_in_further_layer(model, name))
    cases = (
        ("is missing", "are missing", missing),
        ("has another shape", "have another shape", other),
        ("is of a layer that it does not have", "are of layers that it does not have", more),
    )
    wrong = [
        f"{format_count(len(names), 'weight')} {one if len(names) == 1 else many} ({_some(names)})"
        for one, many, names in cases
        if names
    ]
    if wrong:
        raise ModelLoadError(
            f"'{folder / file}' does not fit the config.json beside it: {' and '.join(wrong)}: use files of one model."
        )


def _is_in_further_layer(model: nn.Module, name: str) -> bool:
    """Return whether a checkpoint's weight belongs to a layer number that an `nn.ModuleList` of the built model does not have."""
    parts = name.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.").split(".")
    module: nn.Module = model
    for part in parts:
        inner = dict(module.named_children())
        if part not in inner:
            return isinstance(module, nn.ModuleList) and part.isdigit()
        module = inner[part]
    return False


def _some(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + ", ..." * (len(names) > LISTED)
