"""The report of a fusion: what a reader finds in it, at any width, in a terminal, a notebook and as text."""

import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from addnorm.fusion.fusion import Fusion
from addnorm.fusion.measure import Times
from addnorm.fusion.measured import Measured
from addnorm.fusion.pattern import Boundary
from addnorm.fusion.proof import Difference, Proof

WIDTHS = (60, 80, 100, 120)


def boundary(layer, name="attention", **more):
    given = {"kind": "layer", "eps": 1e-5, "stream": False, "shape": (2, 4, 8), "dtype": "float32", **more}
    return Boundary(f"layers.{layer}.{name}", f"layers.{layer}.{name}.norm", **given)


def difference(name, off=1e-7, error=2e-7, limit=4e-7):
    return Difference(name, off, error, 3.0, limit)


PROOF = Proof(
    (difference("logits"), difference("cache", 0.0)), (difference("layers.0.weight"),), "float64", "evaluation"
)
MEASURED = Measured(0.2, Times(0.002, 0.001, 7), Times(4.0, 5.0, 5), (2_000_000, 1_000_000))
ALL = (*(boundary(k) for k in range(3)), *(boundary(k, "mlp") for k in range(3)))
LEFT = replace(boundary(0, "embeddings"), reason="its add broadcasts")
DONE = Fusion("Model", (LEFT, *ALL), 1, PROOF, measured=MEASURED)
WRONG = replace(
    PROOF, outputs=(difference("logits", 1e-3), difference("cache")),
    gradients=tuple(difference(f"layers.{k}.weight", math.inf if k == 4 else 1e-3 * (k + 1)) for k in range(5)),
)  # fmt: skip
FAILED = replace(DONE, proof=WRONG, measured=None)
NOTHING = replace(DONE, boundaries=(LEFT,), measured=None)
EMPTY = replace(DONE, boundaries=(), measured=None)
BARE = replace(DONE, measured=None, proof=replace(PROOF, gradients=()))
BLIND = replace(
    DONE, proof=Proof((difference("logits", error=None),), (), "no float64 run: it has none", "training"),
    measured=Measured(0.0, Times(1e-5, 1e-5, 9)),
)  # fmt: skip
EVERY = (DONE, FAILED, NOTHING, EMPTY, BARE, BLIND, replace(DONE, inductor=True, graphs=3))


def printed(done, width=120, colour=False):
    screen = Console(
        file=io.StringIO(),
        width=width,
        highlight=False,
        force_terminal=colour,
        color_system="standard" if colour else None,
    )
    screen.print(done)
    return screen.file.getvalue()


def lines(done, width=120):
    return [" ".join(line.split()) for line in printed(done, width).splitlines()]


def said(done):
    return " ".join(printed(done).split())


def test_those_that_are_alike_are_one_line():
    found = lines(DONE)
    assert found[0] == "Model, evaluation: 6 of 7 Add & Norms are fused"
    assert found[1] == "each LayerNorm 1e-5, returns y, in float32"
    assert "3 x layers.0-2.attention .norm" in found
    assert "3 x layers.0-2.mlp .norm" in found


@pytest.mark.parametrize(
    ("other", "word"),
    [({"eps": 1e-12}, "LayerNorm 1e-12"), ({"kind": "rms", "casting": "llama"}, "RMSNorm 1e-5, casting llama"),
     ({"stream": True}, "y and the sum"), ({"dtype": "bfloat16"}, "bfloat16")],
)  # fmt: skip
def test_what_differs_is_a_line_of_its_own_and_a_column(other, word):
    found = lines(replace(DONE, boundaries=(boundary(0), boundary(2), replace(boundary(1), **other))))
    assert word not in found[1]
    (line,) = [line for line in found if line.startswith("1 x")]
    assert word in line
    assert any(line.startswith("2 x layers.0,2.attention") for line in found)


def test_a_norm_elsewhere_has_its_whole_path_and_the_model_itself_is_said():
    one = replace(boundary(0), add="", norm="head.norm")
    assert "1 x the model head.norm" in lines(replace(DONE, boundaries=(one,)))
    assert "1 x the model the model" in lines(replace(DONE, boundaries=(replace(one, norm=""),)))


def test_what_is_left_has_its_reason():
    left = tuple(replace(one, reason="its norm divides by a length") for one in ALL[:3])
    found = lines(replace(DONE, boundaries=(*left, *ALL[3:], LEFT)))
    at = found.index("Left as they were:")
    assert "3 x layers.0-2.attention .norm its norm divides by a length" in found[at:]
    assert "1 x layers.0.embeddings .norm its add broadcasts" in found[at:]


def test_the_proof_names_the_tensor_of_each_kind_that_is_nearest_its_limit():
    most = replace(PROOF, outputs=(difference("large", 1e-2, 1e-2, 1.0), difference("near", 3e-7)))
    found = lines(replace(DONE, proof=most))
    assert "Proved to be as before but for rounding: 2 outputs and 1 gradient." in found
    assert "output near 3e-7 2e-7 4e-7" in found
    assert "gradient layers.0.weight 1e-7 2e-7 4e-7" in found
    assert not any("large" in line for line in found)
    assert any("from float64." in line for line in found)


def test_the_same_bits_are_told():
    assert "2 outputs (1 to the bit) and 1 gradient." in said(DONE)
    same = replace(PROOF, outputs=(difference("logits", 0.0),), gradients=())
    assert "Proved to be as before: 1 output (all to the bit) and no gradients." in said(replace(DONE, proof=same))


def test_a_failed_proof_names_the_worst_tensors_in_red_and_measures_nothing():
    text = said(FAILED)
    assert "!! the proof failed, and it is as it was" in text
    assert "!! 1 of 2 outputs and 5 of 5 gradients are off by more than their limit:" in text
    found = [line for line in lines(FAILED) if line.endswith("!!")]
    assert [line.split()[1] for line in found] == ["logits", "layers.4.weight", "layers.3.weight", "layers.2.weight"]
    assert " inf " in found[1]
    assert "and 2 more gradients" in text
    assert "inf: another shape" in text
    assert "are fused" not in text
    assert "\x1b[1;31m" in printed(FAILED, colour=True)
    assert "\x1b[1;31m" not in printed(DONE, colour=True)


def test_what_it_brings_is_said_beside_what_it_could():
    text = said(DONE)
    assert "Add & Norm was 20% of the forward pass: were it free, the pass would be 1.25 times as fast." in text
    found = lines(DONE)
    assert "inference 2.00 ms 1.00 ms 2.00 times as fast" in found
    assert "training step 4.00 s 5.00 s 0.80 times as fast" in found
    assert "kept for backward 2.00 MB 1.00 MB 50% less" in found
    assert "Medians of 7 and 5 runs, before and after in turn." in found


def test_inductor_gains_more_than_the_share():
    text = said(replace(DONE, inductor=True, graphs=3))
    assert "are fused, in 3 graphs, compiled by Inductor" in text
    assert "no more comes from fusing it; the rest is Inductor's" in text


def test_without_gradients_or_an_oracle_or_measurements():
    assert "no gradients" in said(BARE)
    assert "forward pass" not in said(BARE)
    text = said(BLIND)
    assert "Model, training:" in text
    assert "Eager's own error is not known (no float64 run: it has none)." in text
    assert "output logits 1e-7 4e-7" in lines(BLIND)
    assert "training step" not in text
    assert "10.0 µs" in text
    assert "0% of the forward pass" in text


def test_where_nothing_is_fused_nothing_is_claimed():
    assert "its Add & Norm is not fused; it is as it was" in said(NOTHING)
    assert "none of 2 Add & Norms is fused" in said(replace(NOTHING, boundaries=(LEFT, LEFT)))
    assert "its add broadcasts" in said(NOTHING)
    assert said(EMPTY) == "Model, evaluation: no norm of a sum was found; it is as it was"
    for done in (NOTHING, EMPTY):
        assert "Proved" not in said(done)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("number", range(len(EVERY)))
def test_it_fits_the_terminal(number, width):
    long = "a sentence about a sum that is somewhere else, in another region of the graph"
    paths = tuple(replace(one, norm=f"{one.add}.output.post_attention_layernorm") for one in ALL)
    done = replace(EVERY[number], boundaries=(*EVERY[number].boundaries, *paths, replace(ALL[0], reason=long)))
    text = printed(done, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "…" not in text


@pytest.mark.parametrize("done", EVERY, ids=range(len(EVERY)))
def test_text_and_notebook_say_the_same(done):
    def words(text):
        return re.findall(r"\S+", text)

    class Page(HTMLParser):
        """Its text, and whether every tag is closed."""

        def __init__(self):
            super().__init__()
            self.found, self.open = [], []

        def handle_starttag(self, tag, attrs):
            self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

        def handle_data(self, data):
            self.found.append(data)

    page = Page()
    page.feed(done._repr_html_())
    assert page.open == []
    assert words(" ".join(page.found)) == words(str(done)) == words(printed(done, 100))
    assert max(map(len, str(done).splitlines())) <= 100


def test_names_are_no_markup():
    names = replace(
        DONE, model="<b>[red]", proof=replace(PROOF, outputs=(difference("[0]"), difference("[bold]", 3e-7)))
    )
    assert "<b>[red]" in said(names)
    assert "[bold]" in said(names)
    assert "&lt;b&gt;[red]" in names._repr_html_()
    assert "<b>[red]" not in names._repr_html_()
