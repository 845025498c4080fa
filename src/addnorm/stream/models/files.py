"""A directory with a Hugging Face model, read without running anything that is in it and without the network."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.stream.models.hf import Refused, first_line, quiet, seeded
from addnorm.stream.models.small import model_class

__all__ = ["from_directory"]

# Settings that name code, of the file's author or of somebody on the hub: none is looked at.
CODE = frozenset(
    {
        "auto_map",
        "custom_pipelines",
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    }
)
BESIDE = "pooler"  # behind the last layer; many files have none, and nothing in the stream is read from it
FEW = 3


def from_directory(folder: Path) -> tuple[nn.Module, str]:
    """The model without its head, in eval mode, and the name of the file that its weights come from."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = _settings(folder)
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        reason = "expected a model type that transformers knows"
        if "auto_map" in settings:
            reason = "which only code in that directory could build, and no model's code is run: expected a known type"
        raise Refused(f"'{folder}' has a config.json with model_type {kind!r}, {reason}.")
    if settings.get("quantization_config"):
        raise Refused(f"'{folder}' holds quantized weights, expected floating point ones: take the model's original.")
    config_class = CONFIG_MAPPING[kind]
    made = model_class(config_class)
    if made is None:
        raise Refused(f"'{folder}' has model_type {kind!r}, for which transformers has no model without a head.")
    weights, file = _weights(folder)
    try:
        with quiet(), seeded(0):
            config = config_class.from_dict(_without_code(settings))
            model, told = made.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, all in one
                local_files_only=True,
                trust_remote_code=False,
            )
    except Exception as error:  # transformers raises whatever its code ran into
        raise Refused(f"'{folder}' cannot be made into a {kind} model: {first_line(error)}.") from error
    _check(folder, file, model, told)
    return model.eval(), file


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise Refused(
            f"'{folder}' has no config.json, expected a directory as `save_pretrained` or `hf download --local-dir` make it."
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"'{path}' cannot be read as JSON ({first_line(error)}): download it anew.") from None
    if not isinstance(settings, dict):
        raise Refused(f"'{path}' holds a {type(settings).__name__}, expected an object with the model's settings.")
    return settings


def _without_code(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {name: _without_code(value) for name, value in settings.items() if name not in CODE}
    return settings


# The weights.


def _weights(folder: Path) -> tuple[dict[str, Tensor], str]:
    """All tensors of the files, by the first kind of file that is there; and that file's name."""
    kinds: dict[str, Callable[[Path], Any]] = {"model.safetensors": _safe, "pytorch_model.bin": _pickled}
    for name, read in kinds.items():
        index = f"{name}.index.json"
        if (folder / name).is_file():
            return _tensors(folder / name, read), name
        if (folder / index).is_file():
            weights = {}
            for shard in _shards(folder / index):
                weights.update(_tensors(folder / shard, read))
            return weights, index
    raise Refused(
        f"'{folder}' has no weights, expected model.safetensors, its parts with an index, or pytorch_model.bin."
    )


def _shards(index: Path) -> Iterable[str]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"'{index}' cannot be read as an index of weights ({first_line(error)}): download it anew."
        ) from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise Refused(f"'{index}' names the file {shard!r}, expected files of the same directory only.")
        if not (index.parent / shard).is_file():
            raise Refused(f"'{index}' names the file {shard!r}, which is not there: download it too.")
    return shards


def _tensors(path: Path, read: Callable[[Path], Any]) -> dict[str, Tensor]:
    try:
        found = read(path)
    except pickle.UnpicklingError:
        raise Refused(
            f"'{path}' holds something else than tensors, and nothing of it was run: have it saved as model.safetensors."
        ) from None
    except Exception as error:  # each format has errors of its own
        raise Refused(
            f"'{path}' cannot be read, it is broken or cut off ({first_line(error)}): download it anew."
        ) from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise Refused(f"'{path}' holds something else than named tensors, expected a model's state_dict.")
    return found


def _safe(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _pickled(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _check(folder: Path, file: str, model: nn.Module, told: dict[str, Any]) -> None:
    """Refuses weights that are not those of the model that the configuration describes; more for a head are fine."""
    missing = sorted(name for name in told["missing_keys"] if BESIDE not in name.split("."))
    other = sorted({str(one[0] if isinstance(one, tuple) else one) for one in told["mismatched_keys"]})
    more = sorted(name for name in told["unexpected_keys"] if _is_of_a_further_layer(model, name))
    cases = {"are missing": missing, "have another shape": other, "are of layers that it has not": more}
    wrong = [f"{len(names)} weights {what} ({_some(names)})" for what, names in cases.items() if names]
    if wrong:
        raise Refused(
            f"'{folder / file}' does not fit the config.json beside it: {' and '.join(wrong)}; take both from one model."
        )


def _is_of_a_further_layer(model: nn.Module, name: str) -> bool:
    """Whether a weight would be in a list of layers, behind its end."""
    parts = name.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.").split(".")
    module: nn.Module = model
    for part in parts:
        inner = dict(module.named_children())
        if part not in inner:
            return isinstance(module, nn.ModuleList) and part.isdigit()
        module = inner[part]
    return False


def _some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + ", ..." * (len(names) > FEW)
