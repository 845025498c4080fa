"""Tests of `addnorm wirings`: text, JSON, errors."""

import re

import pytest

from addnorm import wirings
from addnorm.wirings.catalog import CONSTRUCTORS, EXAMPLES
from support.commands import document, run, succeed
from support.pairwise import rotate


def lines_of(*arguments, **env):
    result = succeed("wirings", *arguments, **env)
    assert result.stderr == ""
    return [line.rstrip() for line in result.stdout.splitlines()]


def squeeze(lines):
    """Return the lines with two blanks between columns."""
    return [re.sub(r"(?<=\S)  +(?=\S)", "  ", line) for line in lines]


# The list


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_wirings_list_fits_the_terminal(columns):
    lines = lines_of(COLUMNS=str(columns))
    assert max(map(len, lines)) <= min(columns, 100)
    names = [line.split()[0] for line in lines if line[:1] not in ("", " ")]
    assert names[: len(CONSTRUCTORS) + 1] == ["wiring", *CONSTRUCTORS]
    flowing = " ".join(" ".join(lines).split())
    assert all(f"Use it {wiring.use}" in flowing for wiring in wirings.list_all())
    assert (
        "x' = N(α x + f(x)), α = (2L)^(1/4) Use it for post-LN at any depth: a thousand layers train. Wang et"
        in flowing
    )


# One wiring


@pytest.mark.parametrize(("name", "columns"), rotate([*CONSTRUCTORS], (60, 80, 100), 1))
def test_wirings_describes_each(name, columns):
    options = EXAMPLES.get(name, {})
    wiring = wirings.get(name, **options)
    settings = [word for option, value in options.items() for word in ("--set", f"{option}={value}")]
    lines = lines_of(name, *settings, COLUMNS=str(columns))
    text = "\n".join(lines)
    assert lines[0] == repr(wiring)
    for part in (wiring.equation(), wiring.draw()):
        assert part in text
    flowing = " ".join(text.split())
    for said in (wiring.describe(), wiring.use, wiring.source):
        assert " ".join(said.split()) in flowing
    shown = {*wiring.equation().splitlines(), *wiring.draw().splitlines()}
    words = [line for line in lines if line not in shown and not re.search(r"[─│┌└·=:]", line)]
    assert max(map(len, words)) <= columns
    summary = {"name": wiring.name, "call": repr(wiring), "source": wiring.source, "use": wiring.use}
    more = {"equation": wiring.equation(), "drawing": wiring.draw(), "description": wiring.describe(), "stacks": []}
    assert (summary | more).items() <= document("wirings", name, *settings).items()


def test_wirings_json_lists_each():
    wanted = [(name, wirings.get(name, **EXAMPLES.get(name, {})).source) for name in CONSTRUCTORS]
    assert [(one["name"], one["source"]) for one in document("wirings")] == wanted


def after(lines, title):
    return lines[lines.index(title) + 1 :]


def test_wirings_encoder_decoder():
    lines = lines_of("deepnorm", "--layers", 12, "--decoder-layers", 6)
    encoder, decoder = (
        after(lines, "Encoder: 12 layers of 2 sublayers"),
        after(lines, "Decoder: 6 layers of 3 sublayers"),
    )
    assert (encoder[1], decoder[1]) == ("x' = N(1.686 x + f(x))", "x' = N(2.06 x + f(x))")
    gains = [line.split()[-1] for line in lines if "gain" in line]
    assert gains == ["0.4179", "0.3433"]


@pytest.mark.parametrize(
    ("name", "layers", "rows"),
    [
        ("layernorm_scaling", 3, ["1 1 1 1", "2 1 1 0.7071", "3 1 1 0.5774"]),
        ("layernorm_scaling", 100, ["1 1 1 1", "2 1 1 0.7071", "3 1 1 0.5774", "50 1 1 0.1414", "100 1 1 0.1"]),
        # sqrt(k / (k + 1)) and sqrt(1 / (k + 1)) of each sublayer k
        (
            "depth_scaled",
            12,
            ["1 0.7071 0.7071 1", "2 0.8165 0.5774 1", "3 0.866 0.5 1", "12 0.9608 0.2774 1", "24 0.9798 0.2 1"],
        ),
    ],
)
def test_wirings_varying_factors(name, layers, rows):
    lines = lines_of(name, "--layers", layers)
    assert [" ".join(line.split()) for line in lines if re.match(r"\d+  ", line)] == rows


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["layer_scale", "--layers", 30], "1 to 30  1  a learned vector that starts at 1e-5  1"),
        (["admin", "--layers", 3], "1 to 3  a learned vector that starts as measured  1  1"),
        (["admin", "--set", "profiled=false", "--layers", 12],
         "1 to 12  a learned vector that starts at 2.601  1  1"),
        (["pre_ln", "--layers", 1], "1  1  1  1"),
        (["pre_ln", "--layers", 1], "1 layer of 2 sublayers"),
        (["pre_ln", "--set", "init=gpt2", "--layers", 8], "out, down  normal, standard deviation 0.005"),
        (["mix_ln", "--set", "k=None", "--layers", 4], "layer 1:  x' = N(x + f(x))"),
        (["post_ln", "--set", "init=depth_scaled", "--layers", 4],
         "query, key, value, out, up, gate, down  Xavier-uniform in layer 1 ... Xavier-uniform, gain 0.5 in"),
    ],
)  # fmt: skip
def test_wirings_options_change_constants(arguments, line):
    assert line in squeeze(lines_of(*arguments))


def test_wirings_json_rows():
    (stack,) = document("wirings", "layer_scale", "--layers", 24)["stacks"]
    assert (stack["stack"], stack["layers"], stack["sublayers_per_layer"], stack["final_norm"]) == (None, 24, 2, True)
    assert [(row["layer"], row["sublayer"]) for row in stack["rows"]] == [(n, k) for n in range(24) for k in range(2)]
    row = stack["rows"][7]
    assert (row["norm_in"], row["norm_branch"], row["norm_out"], row["a"], row["c"]) == (True, False, False, 1.0, 1.0)
    assert row["b"] == {"learned": True, "start": 1e-5, "per_feature": True, "shared": False}
    assert row["init"]["query"] == {"kind": "xavier_uniform", "gain": 1.0}


def test_wirings_json_stages():
    wiring = document("wirings", "x0_residual", "--layers", 3)
    (stack,) = wiring["stacks"]
    assert (wiring["embedding"], "rows" in stack) == ([1.0, 1.0], False)
    assert [(stage["n"], stage["n_out"]) for stage in stack["stages"]] == [(2, 2)] * 3 + [(2, 3)] + [(3, 3)] * 2
    first = stack["stages"][0]
    scale = {"learned": True, "start": 1.15, "per_feature": False, "shared": False}
    assert first["collapse"] == [[scale, {**scale, "start": 0.2}]]
    assert first["inject"] == [1.0, 0.0]
    assert stack["head"]["collapse"] == [[1.0, 0.0, {**scale, "start": -0.2}]]
    mhc = document("wirings", "mhc", "--layers", 1)["stacks"][0]
    kinds = [part["coefficients"]["kind"] for part in (mhc["stages"][1], mhc["head"])]
    assert kinds == ["ManifoldConnection", "SigmoidRead"]


def test_wirings_streams_at_a_depth():
    lines = squeeze(lines_of("attention_residuals", "--layers", 3))
    assert [line for line in lines if re.match(r"[1-6]  ", line)] == [f"{k}  {k + 1}" for k in range(1, 7)]
    assert "1 to 3  4" in squeeze(lines_of("mhc", "--layers", 3))
    assert [line for line in squeeze(lines_of("b2t", "--layers", 1)) if line in ("1  2", "2  1")] == ["1  2", "2  1"]


def test_wirings_json_stacks():
    encoder, decoder = document("wirings", "deepnorm", "--layers", 12, "--decoder-layers", 6)["stacks"]
    assert [(stack["stack"], len(stack["rows"])) for stack in (encoder, decoder)] == [("encoder", 24), ("decoder", 18)]
    assert encoder["rows"][0]["a"] == wirings.deepnorm("encoder", 6).row(0, 0, 12).a  # with every digit
    (stack,) = document("wirings", "admin", "--layers", 2)["stacks"]
    assert stack["rows"][0]["a"]["start"] == "measured"


def test_wirings_respects_no_color():
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    assert "\x1b[1;36m" in run("wirings", "pre_ln", **terminal).stdout
    assert "36m" not in run("wirings", "pre_ln", **terminal, NO_COLOR="1").stdout
