"""matplotlib's SVG as a part of a page: themed, without what only a file of its own needs, and the only one with its ids.

What it guarantees:

- Colours of `THEMED` are CSS variables of the page, so that one drawing is right in light and in dark; others stay.
- Its ids begin with the name of the drawing, and only what is referred to has one: drawings on one page do not collide.
- Fonts are the page's. No prolog, no metadata, no date, no link to anywhere: the same drawing is the same text.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

__all__ = ["INK", "PAPER", "THEMED", "themed"]

# Colours that are drawn with to be told apart from any other: no colour map has them.
INK, PAPER = "#1b1c1d", "#fefdfc"
THEMED = {
    INK: "var(--ink)", PAPER: "var(--paper)", "#dddddd": "var(--grid)", "#6b6b6b": "var(--muted)",
    "#b00020": "var(--alarm)", "#0072b2": "var(--series-1)", "#d55e00": "var(--series-2)",
    "#009e73": "var(--series-3)", "#cc79a7": "var(--series-4)",
}  # fmt: skip
"""The colours of addnorm's drawings, and the variable of style.css that each is."""

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_REFERENCE = re.compile(r"(?<=#)[\w.-]+(?=\)|$)")
_FONT = re.compile(r"(?<=px )[^;]+|(?<=font-family: )[^;]+")
_LONG = re.compile(r"-?\d+\.\d{3,}")
_NOT_TURNED = re.compile(r"rotate\(-?0(\.0)? [^)]*\)")
_GEOMETRY = ("d", "x", "y", "width", "height", "transform", "x1", "x2", "y1", "y2", "cx", "cy", "r", "points")


def themed(svg: str, name: str, label: str, classes: str) -> str:
    """The drawing as it stands in a page.

    Args:
        svg: what matplotlib wrote.
        name: of the drawing, unlike any other's on the page: letters, digits and hyphens.
        label: what it shows, for who cannot see it.
        classes: of the element, for style.css.
    """
    root = ElementTree.fromstring(svg)
    _bare(root)
    for child in [child for child in root if child.tag in ("metadata", "title")]:
        root.remove(child)
    view = root.get("viewBox", "")
    root.attrib = {"class": classes, "viewBox": view, "role": "img", "aria-label": label}
    names = _ids(root, name)
    for element in root.iter():
        if element is root:
            continue
        _restyle(element)
        for key, value in element.attrib.items():
            if key == "href" or "url(#" in value:
                element.set(key, _REFERENCE.sub(lambda found: names.get(found[0], found[0]), value))
    return ElementTree.tostring(root, encoding="unicode")


def _bare(root: ElementTree.Element) -> None:
    """Without namespaces, which HTML gives an svg element by itself; without blanks between elements."""
    for element in root.iter():
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        for rules in [child for child in element if child.tag.endswith("}style")]:
            element.remove(rules)  # they would be the whole page's; style.css has them for drawings
        if not element.tag.endswith(("}text", "}tspan")):
            element.text = None
        element.tag = element.tag.rpartition("}")[2]
        element.tail = "\n" if element.tag == "g" else None


def _ids(root: ElementTree.Element, name: str) -> dict[str, str]:
    """Takes away the ids that nothing refers to, and gives the others new names, by their order."""
    wanted = {
        found
        for element in root.iter()
        for key, value in element.attrib.items()
        if key == "href" or "url(#" in value
        for found in _REFERENCE.findall(value)
    }
    names: dict[str, str] = {}
    for element in root.iter():
        if (old := element.attrib.pop("id", None)) in wanted and old is not None:
            names[old] = f"{name}-{len(names) + 1}"
            element.set("id", names[old])
    return names


def _restyle(element: ElementTree.Element) -> None:
    """The page's fonts and colours; no more decimals than a screen has."""
    for key in ("fill", "stroke"):  # of a pattern's parts; a variable has no place in an attribute
        if element.get(key, "").lower() in THEMED:
            element.set("style", f"{key}: {element.attrib.pop(key)}; {element.get('style', '')}".rstrip("; "))
    style = element.get("style")
    if style is not None:
        if element.tag == "text" and not re.search(r"(^|[; ])fill:", style):
            style = f"{style}; fill: #000000"  # which matplotlib leaves out
        style = _COLOUR.sub(lambda found: THEMED.get(found[0].lower(), found[0]), style)
        element.set("style", _FONT.sub("var(--font)", style))
    if "transform" in element.attrib and not (turned := _NOT_TURNED.sub("", element.attrib["transform"])).strip():
        del element.attrib["transform"]
    elif "transform" in element.attrib:
        element.set("transform", turned)
    for key in _GEOMETRY:
        if key in element.attrib:
            element.set(key, _LONG.sub(lambda found: f"{float(found[0]):.2f}", element.attrib[key]))
