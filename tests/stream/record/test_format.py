"""How a recording shows itself: in a line, in the terminal, as HTML."""

from rich.console import Console

from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite
from support.recordings import NAN, WRITES, filled, series_of, sites


def test_repr_is_one_line():
    assert repr(Recording()) == "<Recording: 0 sublayers, no steps>"
    assert repr(filled(*WRITES)) == "<Recording of Toy: 4 sublayers, 2 steps 0 ... 5>"
    assert repr(series_of([1.0])) == "<Recording of Toy: 4 sublayers, 1 step 0, with gradients>"
    two = Recording([*sites(1, "encoder"), *sites(1, "decoder")])
    assert repr(two) == "<Recording: 4 sublayers in 2 streams, no steps>"


def test_the_terminal_has_a_row_for_each_site_and_a_column_for_what_was_recorded():
    rec = filled((0, 1, "out", "rms", 1.2345), (0, 1, "write", "ratio", NAN))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123 (closed with the console)
    with console.file:
        console.print(rec)
    text = console.export_text()
    assert "Recording of Toy: 4 sublayers" in text
    for word in ("0.attn", "1.mlp", "feed-forward", "stream rms", "1.23", "write / stream", "nan"):
        assert word in text
    assert "similarity  " not in text.split("stream rms:")[0]


def test_html_is_static_and_escaped():
    rec = Recording(
        [RecordedSite("<script>alert(1)</script>", "p", "attention", 0)], {"model": "<img src=x onerror=y>"}
    )
    rec.add(0, 0, "out", "rms", 1.0)
    page = rec._repr_html_()
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == 1
    assert "<svg" not in Recording()._repr_html_()


def test_html_draws_what_is_not_finite_as_a_cross_and_says_so():
    values = [1.0, NAN, 3.0, 400.0]
    page = filled(*((0, site, "out", "rms", value) for site, value in enumerate(values)))._repr_html_()
    assert "log scale: 1 to 400, 1 not finite" in page
    assert page.count("<circle") == 3
    assert page.count("#B00020") == 1
