"""The commands with a MODEL argument: `ablate`, `decompose`, `fuse`, `inspect`, `record`."""

from __future__ import annotations

from typing import Any

import click

from addnorm_cli.dispatch import run_command
from addnorm_cli.parameters import COUNT, FILE, FOLDER, OneOf, model_parameters

__all__ = ["ablate", "decompose", "fuse", "inspect", "record"]

float64_option = click.option("--float64", is_flag=True, help="Use a float64 copy of the model: errors below 1e-10.")


@click.command()
@click.option(
    "--mode",
    type=OneOf(["zero", "mean"]),
    default="zero",
    help="Replace the write by zero (default) or its mean.",
)
@model_parameters
def ablate(**options: Any) -> None:
    r"""Remove each sublayer in turn and measure how the output changes.

    A sublayer is removed by replacing its write, the tensor that it adds to the residual stream, by zero or by its mean.

    \b
      addnorm ablate minilm
      addnorm ablate gpt2 --mode mean
    """
    run_command("ablate", options)


@click.command()
@float64_option
@model_parameters
def decompose(**options: Any) -> None:
    r"""Compute each sublayer's share of a model's residual stream.

    The stream after its last sublayer is a sum with one part for each source: x_0 (the embeddings), what each sublayer added, and
    the biases of the norms. The exit code is 3 if the parts do not add up to the stream.

    \b
      addnorm decompose minilm
      addnorm decompose gpt2 --layers 6 --float64
    """
    run_command("decompose", options)


@click.command()
@click.option(
    "--compile", "inductor", is_flag=True, help="Compile the fused graphs with Inductor, as torch.compile does."
)
@click.option("--benchmark", is_flag=True, help="Also measure time and memory, before and after.")
@model_parameters
def fuse(**options: Any) -> None:
    r"""Fuse the Add & Norms of a model and prove that its results stay the same.

    The exit code is 3 if the proof fails, or if there is nothing to fuse.

    \b
      addnorm fuse minilm
      addnorm fuse llama --dtype bfloat16 --train
    """
    run_command("fuse", options)


@click.command()
@float64_option
@click.option("--report", type=FILE, metavar="FILE", help="Write a report on the model; FILE ends in .html.")
@model_parameters
def inspect(**options: Any) -> None:
    r"""Find the residual streams of a model and prove their equations.

    Each equation is computed again in float64 and compared with the model's own values. With --report the model is also recorded
    forward and backward, and run without each sublayer: one HTML file.

    \b
      addnorm inspect minilm --report minilm.html
      addnorm inspect llama --layers 4
      addnorm inspect my_models:make_encoder
    """
    run_command("inspect", options)


@click.command()
@click.option("--steps", type=COUNT, metavar="N", help="Number of batches (default: all texts, or one).")
@click.option("--only", metavar="LAYERS", help="Record only these layers, counted from 1: 1,3-5.")
@click.option("--no-grads", "grads", flag_value=False, default=True, help="Record the forward pass only.")
@click.option("--memory-map", is_flag=True, help="Also print each source's share of the stream at its end.")
@click.option("--out", type=FILE, metavar="FILE", help="Write the recording; FILE ends in .json or .parquet.")
@click.option("--plots", type=FOLDER, metavar="DIR", help="Write plots by depth to the folder DIR.")
@model_parameters
def record(**options: Any) -> None:
    r"""Record the residual streams of a model, forward and backward, by depth.

    A step is one batch of texts (8, or --batch), forward and backward; nothing is trained. Ctrl-C keeps the finished steps.

    \b
      addnorm record gpt2
      addnorm record minilm --text FILE --out run.parquet --plots plots
    """
    run_command("record", options)
