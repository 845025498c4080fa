"""Tests of tables and paragraphs as text, rich, HTML and Markdown."""

import io
import sys

import pytest
from rich.console import Console

from addnorm._util.blocks import Column, Drawing, Finding, Paragraph, Table, TableRow
from addnorm._util.render import STYLES, Rendered, make_console, to_html, to_markdown, to_rich, to_text
from support.report_pages import Document


class Report(Rendered):
    def _blocks(self):
        yield Paragraph(("Model <b>", "strong"), ", evaluation: ", ("[red]pre_ln", "accent"))
        yield Paragraph("Left as they were:", space=True)
        yield Table(
            [Column("", "right"), Column("add in", fold=True), Column("rms", "right")],
            [
                ["3 x", "layers.0-2.attention", "1.02"],
                TableRow(["1 x", "<script>", "nan"], "bad"),
                ["2 x", ("α & β", "dim")],
            ],
            indent=2,
        )
        yield Drawing("<svg><title>rms</title></svg>")


def lines(block, width=100):
    return to_text([block], width).splitlines()


def test_text_is_plain():
    assert str(Report()).splitlines() == [
        "Model <b>, evaluation: [red]pre_ln",
        "",
        "Left as they were:",
        "       add in                 rms",
        "  3 x  layers.0-2.attention  1.02",
        "  1 x  <script>               nan",
        "  2 x  α & β",
    ]


def test_console_shows_the_same_with_styles():
    def printed(color_system):
        console = Console(
            file=io.StringIO(), width=100, force_terminal=bool(color_system), color_system=color_system, highlight=False
        )
        console.print(Report())
        return console.file.getvalue()

    assert [line.rstrip() for line in printed(None).splitlines()] == str(Report()).splitlines()
    assert "\x1b[1;31m" in printed("standard")
    assert "\x1b[1;36m[red]pre_ln" in printed("standard")


def test_html_escapes_texts_and_has_no_script():
    text = Report()._repr_html_()
    elements = Document(text).elements
    assert {element["tag"] for element in elements} == {
        "p", "span", "table", "thead", "tbody", "tr", "th", "td", "svg", "title",
    }  # fmt: skip
    assert {name for element in elements for name in element} == {"tag", "text", "inside", "style"}
    assert "&lt;script&gt;" in text
    assert '<td style="text-align:right;color:#b00;font-weight:bold">nan</td>' in text
    assert text.endswith("<svg><title>rms</title></svg>")


def test_html_scrolls_long_tables_and_shows_title_and_caption():
    table = Table(["n"], [[str(k)] for k in range(31)], title="<T>", caption="c & d")
    text = to_html([table])
    assert text.startswith('<div style="max-height:24em;overflow:auto"><table><caption')
    assert "&lt;T&gt;" in text
    assert text.endswith('<p style="opacity:0.7">c &amp; d</p>')


def test_text_shows_title_and_caption():
    assert lines(Table(["n", "m"], [["1", "2"]], title="Title", caption="Note")) == ["Title", "n  m", "1  2", "Note"]


def test_folded_columns_wrap_and_others_do_not():
    long = "layers.0.self_attention.output.dense"
    text = lines(Table([Column("path", fold=True), "kind"], [[long, "attention"]]), 30)
    assert max(map(len, text)) <= 30
    assert text[1].endswith("attention")
    assert "".join(line.split()[0] for line in text[1:]) == long


def test_paragraph_wraps_with_indents():
    words = " ".join(["word"] * 12)
    text = lines(Paragraph(words, indent=2, hang=3, width=40), 100)
    assert text[0].startswith("  word")
    assert all(line.startswith("     word") for line in text[1:])
    assert max(map(len, text)) <= 40
    assert lines(Paragraph("a\n\nb", indent=1)) == [" a", "", " b"]
    assert to_text([Paragraph(""), Paragraph("end")]) == "\nend"
    assert to_text([Paragraph("one\n"), Paragraph("two")]) == "one\n\ntwo"


WIDE = Table(
    [Column("layer", "right"), "sublayer", Column("module", drop="first"), Column("stream rms", "right", drop="last"),
     Column("write ratio", "right", drop="last")],
    [["1", "attention", "layers.0.attention", "1.02", "0.5"]], caption="Note.",
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "headings", "more"),
    [
        (58, ["layer  sublayer   module              stream rms  write ratio"], ""),
        (53, ["                                      stream  write", "layer  sublayer   module                 rms  ratio"], ""),
        (33, ["                  stream  write", "layer  sublayer      rms  ratio"], ""),
        (28, ["                stream write", "layer sublayer     rms ratio"], ""),
        (24, ["                stream", "layer sublayer     rms"], "write ratio"),
        (16, ["layer sublayer"], "stream rms, write ratio"),
    ],
)  # fmt: skip
def test_narrow_terminal_drops_columns(width, headings, more):
    text = lines(WIDE, width + (0 if width != 58 else 10))
    assert text[: len(headings)] == headings
    note = " ".join(" ".join(text).split("Note.")[1].split())
    assert note == (f"A wider terminal shows more: {more}." if more else "")
    assert max(map(len, text)) <= width + 10


def test_html_and_markdown_keep_every_column():
    assert "write ratio" in to_html([WIDE])
    assert "module" in to_markdown(WIDE)


@pytest.mark.parametrize(("indent", "width", "shown"), [(0, 6, True), (0, 5, False), (2, 8, True), (2, 7, False)])
def test_wide_letters_are_measured_in_columns(indent, width, shown):
    table = Table(["語", Column("x", drop="last")], [["語語", "1"]], indent=indent)
    assert ("x" in lines(table, width)[0]) is shown


def test_row_with_too_many_cells_is_refused():
    with pytest.raises(ValueError, match="a row has 2 cells, expected at most 1"):
        Table(["a"], [["1", "2"]])


def test_text_ignores_the_environment(monkeypatch):
    for name, value in (("COLUMNS", "20"), ("FORCE_COLOR", "1"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    assert str(Report()).count("\n") == 6
    assert "\x1b" not in str(Report())


@pytest.mark.parametrize(
    ("columns", "width"), [("0", 123), ("-5", 123), ("many", 123), ("", 123), ("1", 20), ("40", 40)]
)
def test_console_has_width_where_there_is_no_terminal(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    console = make_console(width=123)
    console.print("α")
    sys.stdout.flush()
    assert (console.width, sys.stdout.buffer.getvalue()) == (width, b"?\n")
    assert make_console(stderr=True).width >= 20


def test_paragraph_style_covers_every_line():
    console = Console(file=io.StringIO(), width=20, force_terminal=True, color_system="standard")
    console.print(*to_rich([Paragraph("one two three four five six", style="bad", indent=1, hang=2)], 20))
    styled = console.file.getvalue().splitlines()
    assert len(styled) == 2
    assert all("\x1b[1;31m" in line for line in styled)


def test_numbers_of_a_column_are_formatted_together():
    columns = ["rms", "us", "mixed", Column("n", "left")]
    table = Table(columns, [[1.0, 2.4, 1.5, 3], [0.25, None, "none", 4], []])
    assert (table.numeric, table.aligned) == ([True, True, False, True], ["right", "right", "left", "left"])
    assert [cell.text for cell in table.texts[1]] == ["0.250", "", "none", "4"]
    assert [cell.value for cell in table.texts[0]] == ["1.0", "2.4", "", ""]


def test_refuted_finding_is_shown_as_bad():
    finding = Finding("The loss falls.", "refuted", "slope < 0", {"slope": 0.5}, "loss")
    assert to_text([finding]) == finding.claim == finding.sentence
    assert to_html([finding, Finding("Noted.")]) == f'<p style="{STYLES["bad"][1]}">The loss falls.</p><p>Noted.</p>'
