"""`addnorm locate`: which state, read or write of a model's residual streams a saved tensor is."""

from pathlib import Path
from typing import Any

from torch import Tensor

import addnorm
from addnorm.cli._model import ModelOptions, document_of, find_streams, load_model, with_model
from addnorm.cli._output import ArgumentError, ProofError, argument_errors, name_flag, print_json, stdout
from addnorm.stream.states import load_saved


@with_model
def run(model: ModelOptions, tensor: Path, as_json: bool) -> None:
    """Name the tensor of a file."""
    captured = _read(tensor)
    loaded = load_model(model)
    config: Any = getattr(loaded.model, "config", None)
    if hasattr(config, "output_hidden_states"):
        config.output_hidden_states = True  # a model of transformers then returns its states, which are named by index
    inspection = find_streams(loaded)
    flags = {"tensor": "TENSOR"}
    try:
        with argument_errors(flags):
            location = addnorm.locate(inspection, captured)
    except TypeError as error:
        raise ArgumentError(name_flag(error, flags)) from None
    if as_json:
        print_json(document_of(loaded, "addnorm.location", model=inspection.model, location=location.to_dict()))
    elif location.found:
        stdout().print(str(location), markup=False, highlight=False)
    if not location.found:
        raise ProofError(f"{tensor} has {location}.")


def _read(path: Path) -> Tensor:
    """Return the tensor of a file of `torch.save`."""
    with argument_errors():
        found = load_saved(path, "TENSOR", "a file of torch.save with one tensor")
    if not isinstance(found, Tensor) or not found.is_floating_point():
        what = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ArgumentError(
            f"TENSOR is {str(path)!r}, which has {what}, expected one tensor of floating-point numbers."
        )
    return found
