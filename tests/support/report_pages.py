"""Parser and checks of a report's HTML page, for every test that writes one: valid nesting, no scripts, no external resources."""

import re
from html.parser import HTMLParser
from itertools import pairwise

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use"}
HEADINGS = ("h1", "h2", "h3", "h4")


class Document(HTMLParser):
    """Parsed page: its elements with their attributes and their text. Parsing checks the nesting."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.text, self.open, self.elements = text, [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len({*names}), f"<{tag}> has an attribute twice"
        element = {"tag": tag, "text": "", "inside": [element["tag"] for element in self.open], **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID or "svg" in element["inside"]:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] is self.elements[-1]:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1]["tag"] == tag, f"</{tag}> closes <{self.open[-1]['tag']}>"
        self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]


def check_page(text):
    """Check the requirements on every page; return it as a `Document`."""
    page = Document(text)
    assert text.startswith("<!DOCTYPE html>\n")
    (html,) = page.all("html")
    assert html["lang"] == "en"
    tags = {element["tag"] for element in page.elements}
    assert not tags & {"script", "iframe", "object", "embed", "link", "img", "form"}
    for element in page.elements:
        assert not [name for name in element if name.startswith("on")], element
        for name in ("src", "href", "srcset", "data", "action"):
            assert element.get(name, "#").startswith(("#", "data:image/svg+xml;base64,")), element
    assert "@import" not in text
    assert {*re.findall(r"url\((.)", text)} <= {"#"}
    ids = [element["id"] for element in page.elements if "id" in element]
    assert len(ids) == len({*ids})
    references = {*re.findall(r'href="#([^"]+)"', text), *re.findall(r"url\(#([^)]+)\)", text)}
    references |= {
        element[name]
        for element in page.elements
        for name in ("aria-labelledby", "aria-describedby")
        if name in element
    }
    assert references <= {*ids}
    variables = {*re.findall(r"var\((--[\w-]+)", text)}
    assert variables <= {*re.findall(r"(--[\w-]+):", text)}
    levels = [int(element["tag"][1]) for element in page.elements if element["tag"] in HEADINGS]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for figure in (figures := page.all("figure")):
        place = page.elements.index(figure)
        inside = [element["tag"] for element in page.elements[place:] if "figure" in element["inside"]]
        assert {"figcaption", "svg", "details", "summary", "table"} <= {*inside}
    drawings = [svg for svg in page.all("svg") if "svg" not in svg["inside"]]  # an inner one is a panel
    for svg in drawings:
        assert svg["role"] == "img"
        assert svg["aria-label"]
        assert {"viewbox"} <= {*svg}
        assert not {"width", "height", "xmlns"} & {*svg}
    assert len(drawings) == 2 * len(figures)  # a wide and a narrow drawing
    for head in page.all("th"):
        assert head["scope"] in ("col", "row")
    return page


def blocks_of(page, kind):
    """Return the blocks of a kind in a page of `addnorm.report`."""
    return [block for section in page.sections for block in section.blocks if type(block).__name__.lower() == kind]


def titles(page):
    """Return the titles of a page's sections."""
    return [section.title for section in page.sections]


def figure(page, words):
    """Return the figure of a page whose title has these words."""
    (match,) = (one for one in blocks_of(page, "figure") if words in one.title)
    return match


def head(table):
    """Return the headings of a table's columns."""
    return [column.header for column in table.columns]


def tables(page):
    """Return the cells of each table, row by row: the number of a `<data>` element, otherwise the text."""
    cells = []
    for element in page.elements:
        if element["tag"] == "table":
            cells.append([])
        elif element["tag"] == "tr":
            cells[-1].append([])
        elif element["tag"] in ("th", "td"):
            cells[-1][-1].append(element["text"])
        elif element["tag"] == "data":
            cells[-1][-1][-1] = float(element["value"])
    return cells
