"""The commands: their parameters and their help. A docstring is the help; the code is in `addnorm/cli`."""

import re

import click
from click import argument, command, option

from addnorm_cli.command import Command, ModelCommand
from addnorm_cli.parameters import (
    COUNT,
    FILE,
    FOLDER,
    PLACEMENT,
    PRESET,
    REAL,
    TEXT,
    WIRING,
    find_names,
    numbers,
    one_of,
    whole,
)

DEPTH = whole(1, 10_000)
NORM = one_of(*find_names("addnorm", "_util/norms.py", r'^    "(\w+)": NormKind\('))
TRACED = one_of("layer", "rms")  # `trace` has formulas of its own
float64 = option("--float64", is_flag=True, help="Use a float64 copy of the model: errors below 1e-10.")


class _SignedCommand(Command):
    """Command whose arguments may be negative numbers. A space before the minus keeps click from reading an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [re.sub(r"^-(?=[\d.]|inf|nan)", " -", arg, flags=re.I) for arg in args])


@command(cls=ModelCommand)
@option(
    "--mode",
    type=one_of("zero", "mean"),
    default="zero",
    help="Replace the write by zero (default) or its mean.",
)
def ablate() -> None:
    r"""Remove each sublayer in turn and measure how the output changes.

    A sublayer is removed by replacing its write, the tensor that it adds to the residual stream, by zero or by its mean.

    \b
      addnorm ablate minilm
      addnorm ablate gpt2 --mode mean
    """


@command(cls=Command)
@option("--json", "target", metavar="FILE", help="Write the results as JSON; - is stdout, instead of tables.")
@option("--norm", "norms", type=NORM, multiple=True, help="Only this norm (repeatable).")
@option("--dtype", "dtypes", type=one_of("float32", "bfloat16"), multiple=True, help="Only this dtype (repeatable).")
@option("--threads", type=COUNT, help="Measure on 1 and on N threads (default: torch's number).")
@option("--rounds", type=whole(1, 10_000), help="Timings of each variant (default 21, with --quick 5).")
@option("--quick", is_flag=True, help="Three small sizes, few rounds, no torch.compile: under half a minute.")
@option("--compile/--no-compile", "compiled", default=None, help="Also time torch.compile (takes minutes).")
def bench() -> None:
    r"""Measure the speed and the accuracy of add + norm against PyTorch.

    addnorm is compared with eager PyTorch, torch.compile and, where it is installed, onnxruntime. Without --quick it takes
    several minutes. The exit code is 3 if an error is beyond its limit.

    \b
      addnorm bench --quick
      addnorm bench --norm rms --dtype bfloat16 --json results.json
    """


@command(cls=Command)
@argument("compared", nargs=-1, metavar="[WIRING]...", type=WIRING)
@option("--text", type=TEXT, help="UTF-8 text to learn (default: Python's documentation).")
@option("--full", is_flag=True, help="Several depths, learning rates and seeds: about an hour.")
@option("--init-only", is_flag=True, help="No training: measure untrained stacks only.")
@option(
    "--out", type=FOLDER, default="addnorm-compare",
    help="Folder for results (default addnorm-compare).",
)  # fmt: skip
@option("--report", type=FILE, help="The report (default report.html in --out).")
@option("--layers", "num_layers", type=numbers(int), help="Numbers of layers (default 12).")
@option("--rates", type=numbers(float), help="Learning rates (default 1e-3).")
@option(
    "--warm-up", "warm_ups", type=numbers(int),
    help="Steps of warm-up, at most --steps (default 0,100; half of --steps if that is less).",
)  # fmt: skip
@option("--seeds", type=whole(1, 1000), help="Number of seeds (default 1).")
@option("--steps", type=COUNT, help="Steps of each run (default 200).")
@option("--d-model", type=COUNT, help="Width of the model (default 64).")
@option("--heads", "nhead", type=COUNT, help="Attention heads (default 4).")
@option("--tokens", type=COUNT, help="Characters in a sequence (default 64).")
@option("--batch", type=COUNT, help="Sequences in a step (default 16).")
@option("--norm", type=NORM, help="Kind of norm (default layer, LayerNorm).")
@option("--jobs", type=COUNT, help="Processes (default: one a core).")
@option("--cluster", metavar="ADDRESS", help="Train on a Dask cluster, as in tcp://10.0.0.5:8786.")
@option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compare() -> None:
    r"""Train small models with different wirings and write a report.

    WIRING is a name of `addnorm wirings`, with options after a colon; post_ln and pre_ln by default. Without options it takes
    about two minutes and illustrates; --full is evidence. After Ctrl-C or a crash the same command continues. The exit code is 3
    if a published result does not hold for untrained stacks.

    \b
      addnorm compare post_ln pre_ln
      addnorm compare pre_ln mix_ln:k=3 --layers 6,12 --rates 1e-3,3e-3
    """


@command(cls=ModelCommand)
@float64
def decompose() -> None:
    r"""Compute each sublayer's share of a model's residual stream.

    The stream after its last sublayer is a sum with one part for each source: x_0 (the embeddings), what each sublayer added, and
    the biases of the norms. The exit code is 3 if the parts do not add up to the stream.

    \b
      addnorm decompose minilm
      addnorm decompose gpt2 --layers 6 --float64
    """


@command(cls=Command)
def demo() -> None:
    """Show in a few minutes what addnorm does.

    One token step by step, the speed, a real model inspected, recorded and fused, and two wirings trained. Its files are
    in the folder addnorm-demo. The exit code is 3 if a proof fails.
    """


@command(cls=Command, keeps_output=False)
@argument("recordings", nargs=-1, type=FILE, metavar="[RECORDING]...")
@option(
    "--port",
    type=whole(0, 65535),
    help="Port; 0 is any free one (default 8017).",
)
@option(
    "--host", default="127.0.0.1", metavar="NAME", help="Address to listen at (default 127.0.0.1, this machine only)."
)
@option("--open", "opens_browser", is_flag=True, help="Also open the page in the browser.")
@option("--export", "folder", type=FOLDER, help="Write the page to a folder that needs no server, and end.")
def explore() -> None:
    r"""Serve the explorer, a local web page, and print its address.

    RECORDING is a file of `addnorm record --out`. Move the LayerNorm of a stack, follow one token, look into a recording, train
    two wirings side by side. Only this machine can reach the page, unless --host names another address; other machines then need
    the printed token. The page loads nothing from elsewhere. Ctrl-C ends the server.

    With --export the folder has the page with some settings, measured beforehand, and a recording: for a web host, or to open its
    index.html from the disk. Races need the server.

    \b
      addnorm explore
      addnorm record minilm --out minilm.json --memory-map
      addnorm explore minilm.json
      addnorm explore --export site minilm.json
    """


@command(cls=ModelCommand)
@option("--compile", "inductor", is_flag=True, help="Compile the fused graphs with Inductor, as torch.compile does.")
@option(
    "--benchmark/--no-benchmark", default=True, help="Measure time and memory, before and after (default: measure)."
)
def fuse() -> None:
    r"""Fuse the Add & Norms of a model and prove that its results stay the same.

    A model that is slower when fused is left as it is, unless --no-benchmark is given. The exit code is 3 if the proof fails, or
    if there is nothing to fuse.

    \b
      addnorm fuse minilm
      addnorm fuse llama --dtype bfloat16 --train
    """


@command(cls=ModelCommand)
@float64
@option("--report", type=FILE, help="Write a report on the model; FILE ends in .html.")
@option("--expect", "wiring", type=WIRING, help="Compare with this wiring, or NAME:OPTION=VALUE,...")
@option("--like", metavar="OTHER", help="Compare it with another MODEL, or a file of `addnorm record --states`.")
def inspect() -> None:
    r"""Find the residual streams of a model and prove their equations.

    Each equation is computed again in float64 and compared with the model's own values. With --report the model is also recorded
    forward and backward, and run without each sublayer: one HTML file. With --expect and --like the exit code is 3 if a term
    differs. OTHER gets the inputs of MODEL; --dtype is that of MODEL alone.

    \b
      addnorm inspect minilm --report minilm.html
      addnorm inspect gpt2 --expect pre_ln
      addnorm inspect deepseek_v4 --expect mhc:n=4
      addnorm inspect llama --layers 4 --dtype bfloat16 --like llama
      addnorm inspect my_models:make_encoder
    """


@command(cls=ModelCommand)
@argument("tensor", metavar="TENSOR", type=FILE)
def locate() -> None:
    r"""Name a captured tensor: which state, read or write of a residual stream it is.

    TENSOR is a file of torch.save, captured from the same model on the same inputs, also by another program: in another dtype,
    with some of the tokens, or in another order of them. The exit code is 3 if it is no value of a stream.

    \b
      addnorm locate gpt2 hidden.pt --input inputs.pt
    """


@command(cls=ModelCommand)
@option("--steps", type=COUNT, help="Number of batches (default: all texts, or one).")
@option("--only", metavar="LAYERS", help="Record only these layers, counted from 1: 1,3-5.")
@option("--no-grads", "grads", flag_value=False, default=True, help="Record the forward pass only.")
@option("--memory-map", is_flag=True, help="Also print each source's share of the stream at its end.")
@option("--out", type=FILE, help="Write the recording; FILE ends in .json or .parquet.")
@option("--plots", type=FOLDER, help="Write plots by depth to the folder DIR.")
@option("--states", type=FILE, help="Save the states of the first batch, for `addnorm inspect --like FILE`.")
def record() -> None:
    r"""Record the residual streams of a model, forward and backward, by depth.

    A step is one batch of texts (8, or --batch), forward and backward; nothing is trained. Ctrl-C keeps the finished steps.

    \b
      addnorm record gpt2
      addnorm record minilm --text FILE --out run.parquet --plots plots
    """


@command(cls=_SignedCommand, keeps_output=False, needs_torch=False)
@argument("vectors", nargs=-1, metavar="[X SUBLAYER]")
@option(
    "--preset", type=PRESET,
    help="Use a worked example instead of vectors.",
)  # fmt: skip
@option("--list", "listing", is_flag=True, help="List the worked examples.")
@option("--placement", type=PLACEMENT, help="Norm after the add (default) or before f.")
@option("--norm", type=TRACED, help="LayerNorm (default) or RMSNorm.")
@option("--gamma", "weight", metavar="VECTOR", help="Scale: d numbers, or one for all (default 1).")
@option("--beta", "bias", metavar="VECTOR", help="Shift: d numbers, or one for all (default 0).")
@option("--eps", type=REAL, help="Added to the variance (default 1e-5).")
@option("--grad", metavar="VECTOR", help="Gradient of the output (default 1,0,...,0).")
@option("--read-grad", metavar="VECTOR", help="Pre-LN: gradient of f's input (default: --grad).")
@option("--variance", type=one_of("biased", "unbiased"), help="Divide by d (default) or by d - 1.")
@option("--eps-place", type=one_of("inside", "outside"), help="Add eps inside the root (default) or to it.")
@option("--digits", type=whole(1, 17), help="Significant digits (default 5).")
@option("--json", "as_json", is_flag=True, help="Print one JSON document, with all digits.")
def trace() -> None:
    r"""Compute Add & Norm of one token step by step, forward and backward.

    X is the token, d numbers separated by commas, and SUBLAYER the output of the sublayer f for it, as many numbers.

    \b
      addnorm trace 1,2,3 0.5,-1,1.5
      addnorm trace --preset lesson-001 --placement pre
    """


@command(cls=Command, keeps_output=False)
@argument("name", required=False, metavar="[NAME]", type=WIRING)
@option("--layers", type=DEPTH, help="Also show the constants for N layers.")
@option("--decoder-layers", type=DEPTH, metavar="M", help="Of an encoder of N and a decoder of M layers.")
@option(
    "--set", "settings", multiple=True, metavar="OPTION=VALUE", help="Option of the wiring, as in k=3 (repeatable)."
)
@option("--json", "as_json", is_flag=True, help="Print one JSON document, with all rows.")
def wirings() -> None:
    r"""List the residual wirings, or describe one.

    A wiring says where the norms are placed and how a sublayer's output is added. With NAME: its equation, a drawing, its source,
    and with --layers its constants.

    \b
      addnorm wirings
      addnorm wirings deepnorm --layers 100
      addnorm wirings mix_ln --layers 12 --set k=3
    """


COMMANDS: tuple[click.Command, ...] = (
    ablate, bench, compare, decompose, demo, explore, fuse, inspect, locate, record, trace, wirings,
)  # fmt: skip
