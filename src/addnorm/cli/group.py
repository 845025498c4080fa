"""The command line: `addnorm COMMAND`. Results on stdout (`--json` for programs), progress on stderr.

Exit codes: 0 done; 2 the arguments were wrong; 3 a proof failed; 130 interrupted.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

import addnorm
from addnorm.cli import trace as cli_trace
from addnorm.cli.compare import compare
from addnorm.cli.explore import explore
from addnorm.cli.screen import screen, wide
from addnorm.trace import PRESETS
from addnorm.trace import trace as follow


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(addnorm.__version__, package_name="addnorm")
def main() -> None:
    """The transformer's Add & Norm: fused, exact, explained."""


@main.command()
@click.option(
    "--json", "target", metavar="FILE", help="Write the results to FILE as JSON; - is stdout, without tables."
)
@click.option(
    "--norm", "norms", type=click.Choice(["layer", "rms"]), multiple=True, help="Only this norm (repeatable)."
)
@click.option("--dtype", "dtypes", type=click.Choice(["float32", "bfloat16"]), multiple=True, help="Only this dtype.")
@click.option("--threads", type=click.IntRange(1), help="Of torch; as torch has it by default. One thread besides.")
@click.option("--rounds", type=click.IntRange(1), help="How often each variant of a cell is timed.")
@click.option("--quick", is_flag=True, help="Three small sizes, few rounds, no torch.compile: under half a minute.")
@click.option("--compile/--no-compile", "compiled", default=None, help="Also time torch.compile (takes minutes).")
def bench(
    target: str | None,
    norms: tuple[Literal["layer", "rms"], ...],
    dtypes: tuple[str, ...],
    threads: int | None,
    rounds: int | None,
    quick: bool,
    compiled: bool | None,
) -> None:
    """Time add + norm against eager PyTorch, torch.compile and onnxruntime, and measure how exact it is."""
    from addnorm import bench as benchmark

    chosen = norms or tuple(benchmark.NORMS), dtypes or tuple(benchmark.DTYPES)
    if quick:
        cells = benchmark.matrix(*chosen, benchmark.QUICK_SHAPES, threads=threads)
    else:
        cells = benchmark.whole(*chosen, threads=threads)
    document = benchmark.run(
        cells,
        rounds=rounds or (benchmark.QUICK_ROUNDS if quick else benchmark.ROUNDS),
        compiled=not quick if compiled is None else compiled,
        progress=benchmark.console(stderr=True),
    )
    if target == "-":
        click.echo(benchmark.dumps(document), nl=False)
    else:
        benchmark.show(document, benchmark.console())
    if target and target != "-":
        click.echo(f"Written: {benchmark.write(document, Path(target))}", err=True)
    _exit(130 if not document["complete"] else 3 if benchmark.failed_proofs(document) else 0)


@main.command()
def demo() -> None:
    """Show in a few minutes what addnorm does; the reports it writes lie in addnorm-demo."""
    from addnorm.cli.demo import operation as demonstration

    _exit(0 if demonstration.run() else 3)


class _Refused(click.ClickException):
    """The arguments were wrong, and the sentence says how: without the usage, which would bury it."""

    exit_code = 2


class _Signed(click.Command):
    """A command whose numbers may be negative: a space before the minus, and click takes it for no option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [re.sub(r"^-(?=[\d.]|inf|nan)", " -", arg, flags=re.I) for arg in args])


@main.command(cls=_Signed)
@click.argument("vectors", nargs=-1, metavar="[X SUBLAYER]")
@click.option("--preset", metavar="NAME", help="A worked example instead of vectors; --list names them.")
@click.option("--list", "listing", is_flag=True, help="Name the worked examples.")
@click.option(
    "--placement", type=click.Choice(["post", "pre"]), help="Norm after the add (default), or before the sublayer."
)
@click.option("--norm", type=click.Choice(["layer", "rms"]), help="LayerNorm (default) or RMSNorm.")
@click.option(
    "--gamma", "weight", metavar="VECTOR", help="The scale: as many numbers as X, or one for all (default 1)."
)
@click.option("--beta", "bias", metavar="VECTOR", help="The shift: as many numbers as X, or one for all (default 0).")
@click.option("--eps", type=float, help="Added to the variance (default 1e-5).")
@click.option("--grad", metavar="VECTOR", help="The gradient of the output (default 1,0,...,0).")
@click.option("--read-grad", metavar="VECTOR", help="Pre-LN: the gradient of what the sublayer read (default: --grad).")
@click.option("--variance", type=click.Choice(["biased", "unbiased"]), help="Divided by d (default) or by d - 1.")
@click.option("--eps-place", type=click.Choice(["inside", "outside"]), help="In the root (default) or added to it.")
@click.option("--digits", type=click.IntRange(1, 17), help="Significant digits shown (default 5).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, with every digit.")
def trace(vectors: tuple[str, ...], preset: str | None, listing: bool, as_json: bool, **given: Any) -> None:
    r"""Follow one token through Add & Norm, step by step, and its gradient back.

    X is the token and SUBLAYER what the sublayer returned for it: numbers with commas, or quoted with spaces.

    \b
      addnorm trace 1,2,3 0.5,-1,1.5
      addnorm trace --preset lesson-001 --placement pre
    """
    if listing:
        cli_trace.list_presets(as_json, screen())
        return
    options = {name: value for name, value in given.items() if value is not None}
    vector, scale = cli_trace.numbers, cli_trace.scale
    for name, parse in {"weight": scale, "bias": scale, "grad": vector, "read_grad": vector}.items():
        if name in options:
            options[name] = parse(options[name])
    try:
        if preset is None:
            followed = follow(*cli_trace.two(vectors), **options)
        elif vectors:
            raise ValueError(
                f"--preset {preset} came with vectors, expected one or the other: it brings its own; drop either."
            )
        elif preset not in PRESETS:
            raise ValueError(
                f"--preset is {preset!r}, expected one of {', '.join(PRESETS)}: `addnorm trace --list` tells more."
            )
        else:
            followed = PRESETS[preset].trace(**options)
    except ValueError as error:
        flags = {"weight": "--gamma", "bias": "--beta", "read_grad": "--read-grad"}
        flags |= {name: f"--{name}" for name in ("grad", "eps", "variance")}
        raise _Refused(re.sub(r"^\w+", lambda name: flags.get(name[0], name[0]), str(error))) from None
    if as_json:
        click.echo(json.dumps(followed.to_dict(), indent=2, allow_nan=False))
    else:
        cli_trace.show_steps(followed, screen())


@main.command()
@click.argument("name", required=False)
@click.option(
    "--layers", type=click.IntRange(1, 10_000), metavar="N", help="Also the constants of a stack of N layers."
)
@click.option(
    "--decoder-layers",
    type=click.IntRange(1, 10_000),
    metavar="M",
    help="And of a decoder of M layers; N are the encoder's.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="OPTION=VALUE", help="An option of the wiring, as in --set k=3."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document, with every row.")
def wirings(
    name: str | None, layers: int | None, decoder_layers: int | None, settings: tuple[str, ...], as_json: bool
) -> None:
    r"""List the residual wirings, or show one: its equation, a drawing, its constants.

    \b
      addnorm wirings
      addnorm wirings deepnorm --layers 100
      addnorm wirings mix_ln --layers 12 --set k=3
    """
    from addnorm.cli import wirings as cli_wirings

    if name is None:
        if layers or decoder_layers or settings:
            raise _Refused(
                "an option came without NAME, expected the wiring that it is for: `addnorm wirings` lists them."
            )
        if as_json:
            click.echo(json.dumps(cli_wirings.listed(), indent=2))
        else:
            cli_wirings.show_all(screen())
        return
    try:
        wiring = cli_wirings.made(name, settings)
        stacks = cli_wirings.stacks(wiring, layers, decoder_layers)
        document = cli_wirings.to_dict(wiring, stacks)  # an option may turn out to be impossible only in a row
    except (ValueError, OverflowError) as error:
        raise _Refused(str(error)) from None
    if as_json:
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        cli_wirings.show(wiring, stacks, screen())


# The commands that run a model.


def _of_a_model(command: Callable[..., str | None]) -> Callable[..., None]:
    """The model, its inputs, and what becomes of the exceptions: a sentence and an exit code."""

    def answered(**given: Any) -> None:
        from addnorm.cli import stream

        model = stream.Given(**{field: given.pop(field) for field in stream.FIELDS})
        try:
            unproved = command(model, **given)
        except stream.Refused as error:
            raise _Refused(str(error)) from None
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            _exit(130)
            return
        if unproved is not None:
            raise _Unproved(unproved)

    asked: Callable[..., None] = functools.update_wrapper(answered, command)
    for option in reversed(_MODEL):
        asked = option(asked)
    return asked


class _Unproved(click.ClickException):
    """Nothing was wrong with the arguments, and what was to be proved does not hold."""

    exit_code = 3


_FILE = click.Path(path_type=Path)
_MODEL = (
    click.argument("name", metavar="MODEL"),
    click.option(
        "--text", type=_FILE, metavar="FILE", help="What the model reads, a text a line, if it has a tokenizer."
    ),
    click.option("--input", type=_FILE, metavar="FILE", help="Its inputs as named tensors: .safetensors or .pt."),
    click.option(
        "--layers", type=int, metavar="N", help="Of a model type, which is built small; as it is made by default."
    ),
    click.option("--tokens", type=int, metavar="N", help="How long random inputs are, or where texts are cut off."),
    click.option(
        "--batch", type=int, metavar="N", help="How many inputs are drawn, or how many texts are read at once."
    ),
    click.option(
        "--dtype", metavar="NAME", help="float32, float64, bfloat16 or float16; as the files have it by default."
    ),
    click.option("--seed", type=int, default=0, metavar="N", help="Of random weights and inputs (default 0)."),
    click.option("--train", is_flag=True, help="In training mode, with dropout; in evaluation mode by default."),
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
)
_float64 = click.option("--float64", is_flag=True, help="Computed by a copy of the model in float64: closes to 1e-10.")


@main.command()
@_of_a_model
@_float64
@click.option("--report", type=_FILE, metavar="FILE", help="Write what was found, measured and proved to FILE.html.")
def inspect(model: Any, report: Path | None, **options: Any) -> str | None:
    r"""Find the residual streams of a model, and prove each by computing it again.

    MODEL is minilm, a directory with a config.json, a transformers model type, which is built small with random weights,
    or module.path:factory, a function of your own that returns (model, args, kwargs). With --report it is also recorded
    forward and backward, and run without each sublayer: one file of HTML, for any browser.

    \b
      addnorm inspect minilm --report minilm.html
      addnorm inspect llama --layers 4
    """
    if report is not None:
        from addnorm.cli import report as cli_report

        return cli_report.inspect(model, wide(), report=report, **options)
    from addnorm.cli import stream

    return stream.inspect(model, wide(), **options)


@main.command()
@_of_a_model
@click.option("--steps", type=click.IntRange(1), metavar="N", help="How many batches; all texts, or one, by default.")
@click.option("--only", metavar="LAYERS", help="Only these layers, counted from 1: 1,3-5.")
@click.option("--no-grads", "grads", flag_value=False, default=True, help="Forward only.")
@click.option("--memory-map", is_flag=True, help="Also show what the stream is made of at its end.")
@click.option("--out", type=_FILE, metavar="FILE", help="Write everything to FILE: .json or .parquet.")
@click.option("--plots", type=_FILE, metavar="DIR", help="Draw it by depth: PNG files in DIR.")
def record(model: Any, **options: Any) -> str | None:
    r"""Run a model forward and backward, and record its residual streams by depth.

    MODEL is as for addnorm inspect. A step is a batch of texts (8, or --batch); nothing is trained. Ctrl-C keeps what was
    recorded.

    \b
      addnorm record minilm --text FILE --out run.parquet --plots plots
    """
    from addnorm.cli import record as cli_record

    return cli_record.record(model, wide(), **options)


@main.command()
@_of_a_model
@_float64
def decompose(model: Any, **options: Any) -> str | None:
    """Take the streams of a model apart: the share that each sublayer has in them at the end.

    MODEL is as for addnorm inspect. What does not add up to the stream is refused.
    """
    from addnorm.cli import stream

    return stream.decompose(model, wide(), **options)


@main.command()
@_of_a_model
@click.option(
    "--mode", type=click.Choice(["zero", "mean"]), default="zero", help="What is written instead (default zero)."
)
def ablate(model: Any, **options: Any) -> str | None:
    """Take each sublayer's write away in turn, and tell what that does to the output.

    MODEL is as for addnorm inspect.
    """
    from addnorm.cli import stream

    return stream.ablate(model, wide(), **options)


@main.command()
@_of_a_model
@click.option(
    "--compile", "inductor", is_flag=True, help="Hand the fused graphs on to Inductor, as torch.compile does."
)
@click.option("--benchmark", is_flag=True, help="Measure times and memory before and after.")
def fuse(model: Any, **options: Any) -> str | None:
    r"""Fuse the Add & Norms of a model and prove that it computes the same.

    MODEL is as for addnorm inspect. Exit code 3 if the proof fails, or if there is nothing to fuse.

    \b
      addnorm fuse minilm
      addnorm fuse llama --dtype bfloat16 --train
    """
    from addnorm.cli import fuse as cli_fuse

    return cli_fuse.fuse(model, wide(), **options)


def _exit(code: int) -> None:
    if code:
        click.get_current_context().exit(code)


main.add_command(compare)
main.add_command(explore)
for _command in main.commands.values():  # click keeps lines as they are after a backspace, which docstrings write as \b
    _command.help = (_command.help or "").replace(r"\b", "\b")


if __name__ == "__main__":
    main()
