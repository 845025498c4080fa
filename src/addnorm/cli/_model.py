"""Commands on a model: its options, loading it, inspecting it, describing it and its inputs, a training step without labels."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import addnorm
from addnorm._util.blocks import VERDICTS
from addnorm._util.numbers import format_count
from addnorm.cli._output import ArgumentError, ProofError, stderr_if_terminal, working
from addnorm.report.model_findings import inspection_findings
from addnorm.stream.ablate import Ablations
from addnorm.stream.inspection import Inspection
from addnorm.stream.models.hf import ModelLoadError, quiet
from addnorm.stream.models.inputs import format_inputs, read_texts
from addnorm.stream.models.load import LoadedModel, input_error, load
from addnorm.stream.outputs import find_logits, find_loss


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The MODEL argument and the options that say how to build and call it."""

    name: str
    text: Path | None
    input: Path | None
    seed: int
    layers: int | None
    tokens: int | None
    batch: int | None
    dtype: str | None
    train: bool

    @property
    def reads_text(self) -> bool:
        """Whether the inputs are tokenized texts."""
        has_tokenizer = self.name == "minilm"
        with suppress(OSError, ValueError):  # a name that is too long for a file
            has_tokenizer |= (Path(self.name) / "tokenizer.json").is_file()
        return self.text is not None or (has_tokenizer and self.input is None)


def with_model(command: Callable[..., None]) -> Callable[..., None]:
    """Pass the model's options to a command as one `ModelOptions`, and turn exceptions into a sentence and an exit code."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        model = ModelOptions(**{field.name: options.pop(field.name) for field in dataclasses.fields(ModelOptions)})
        try:
            command(model, **options)
        except ModelLoadError as error:
            raise ArgumentError(error) from None
        except SystemExit as error:  # click has exceptions of its own
            raise ArgumentError(
                f"MODEL {model.name!r} ends the program (SystemExit: {error.code}): correct the model."
            ) from None

    return run


def load_model(options: ModelOptions, texts: Sequence[str] | None = None) -> LoadedModel:
    """Return the model with its inputs, made from these texts or from those of `--text`."""
    arguments = dataclasses.asdict(options)
    file, inputs, train = (arguments.pop(name) for name in ("text", "input", "train"))
    if file is not None and texts is None:
        texts = read_texts(file)
    with working(f"load {options.name}"):
        loaded = load(**arguments, texts=texts, inputs=inputs)
    for name, value in (*enumerate(loaded.args, 1), *loaded.kwargs.items()):
        if isinstance(value, Tensor) and not value.numel():
            input_name = f"argument {name}" if isinstance(name, int) else name
            raise ArgumentError(
                f"MODEL {options.name!r} has an empty input, {input_name} {tuple(value.shape)}, expected at least one element."
            )
    torch.manual_seed(options.seed)  # for dropout
    loaded.model.train(train)
    return loaded


def inspect_model(loaded: LoadedModel, float64: bool = False) -> Inspection:
    """Return the inspection of a model.

    Raises:
        ModelLoadError: the model raised an error for its inputs.
    """
    try:
        with working(f"inspect {loaded.name}"), quiet():
            return addnorm.inspect(loaded.model, *loaded.args, float64=float64, **loaded.kwargs)
    except Exception as error:  # whatever the model raises
        raise input_error(error, loaded) from error


def find_streams(loaded: LoadedModel) -> Inspection:
    """Return the inspection of a model that has residual streams.

    Raises:
        ModelLoadError: the model raised an error for its inputs.
        ProofError: the model has no residual stream.
    """
    inspection = inspect_model(loaded)
    if not inspection.list_sites():
        check_proof(inspection)
    return inspection


def ablate_model(loaded: LoadedModel, inspection: Inspection, mode: Literal["zero", "mean"] = "zero") -> Ablations:
    """Return the model's output without each of its sublayers, compared with the whole model's."""
    progress = stderr_if_terminal()
    with working(f"ablate {inspection.model}", has_bar=True), quiet():
        return addnorm.ablate_each(inspection, *loaded.args, mode=mode, progress=progress, **loaded.kwargs)


def check_proof(inspection: Inspection) -> None:
    """Raise a ProofError with the first claim about an inspection that does not hold."""
    for finding in inspection_findings(inspection):
        if finding.verdict == VERDICTS[False]:
            reason = f": {inspection.unknown[0].reason}" if inspection.wiring == "none" else ""
            raise ProofError(f"{finding.claim.rstrip('.')}{reason}.")


def document_of(loaded: LoadedModel, schema: str, **content: Any) -> dict[str, Any]:
    """Return a JSON document about a model: the schema, the model's name, the source of its weights, its inputs, the content."""
    return {"schema": schema, "schema_version": 1, **model_facts(loaded), **content}


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    """Return the model's name, the source of its weights and its inputs, for a JSON document."""
    return {"name": loaded.name, "source": loaded.source, "inputs": format_inputs(loaded.args, loaded.kwargs)}


def describe_inputs(loaded: LoadedModel) -> str:
    """Return the inputs in a sentence."""
    mask = token_mask(loaded.kwargs)
    if loaded.texts is not None and mask is not None:
        texts = format_count(len(loaded.texts), "text")
        return f"Inputs: {texts}, {int(mask.sum())} tokens of {mask.numel()} with padding."
    return f"Inputs: {format_inputs(loaded.args, loaded.kwargs)}."


def token_mask(kwargs: dict[str, Any]) -> Tensor | None:
    """Return a mask that is True for all tokens but padding, or None if no single mask fits all token ids."""
    mask = kwargs.get("attention_mask")
    ids = [value for name, value in kwargs.items() if name.endswith("input_ids")]
    if not (isinstance(mask, Tensor) and ids and all(tokens.shape == mask.shape for tokens in ids)):
        return None
    return mask.bool()


def mask_name(loaded: LoadedModel) -> str | None:
    """Return the name of the model's argument that is the padding mask, or None if there is no such mask."""
    return None if token_mask(loaded.kwargs) is None else "attention_mask"


class NoGradientsError(ModelLoadError):
    """Error for a model whose output depends on no parameter."""


class ProbeLoss:
    """Loss without labels: the mean over the tokens of <v, y>, with `v` drawn for each position from N(0, 1/d).

    The mean square of a LayerNorm's output is a constant, and its gradient is round-off. The probe has a gradient in every
    direction. If the model's output has a loss, that loss is used instead.

    Attributes:
        seed: seed of v.
        sentence: description of the loss, for readers.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.sentence = (
            f"The mean over the tokens of ⟨v, y⟩, which needs no labels: y is the model's output, v is drawn for each position "
            f"from N(0, 1/d), seed {seed}."
        )

    def __call__(self, output: Any, mask: Tensor | None) -> Tensor:
        """Return the loss of a model's output; the mask is true for tokens that are not padding."""
        own = find_loss(output)
        if own is not None:
            self.sentence = "The model's own."
            return own
        y = find_logits(output)
        generator = torch.Generator().manual_seed(self.seed)
        v = torch.randn(y.shape[1:], generator=generator).div(y.shape[-1] ** 0.5).to(y.device)
        products = (y.to(torch.promote_types(y.dtype, torch.float32)) * v).sum(-1)
        return products[mask].mean() if mask is not None and mask.shape == products.shape else products.mean()


def run_step(loaded: LoadedModel, kwargs: dict[str, Any], loss: ProbeLoss | None) -> None:
    """Run the model forward and, with a loss, backward. The gradients are cleared afterwards.

    Raises:
        NoGradientsError: the output depends on no parameter.
        ModelLoadError: the model raised an error for its inputs.
    """
    try:
        if loss is None:
            with torch.no_grad():
                loaded.model(*loaded.args, **kwargs)
            return
        value = loss(loaded.model(*loaded.args, **kwargs), token_mask(kwargs))
        if not value.requires_grad:
            raise NoGradientsError(
                f"MODEL {loaded.name!r} has no gradients, its output depends on no parameter: use --no-grads."
            )
        value.backward()
    except ModelLoadError:
        raise
    except Exception as error:  # whatever the model raises
        raise input_error(error, dataclasses.replace(loaded, kwargs=kwargs)) from error
    loaded.model.zero_grad()
