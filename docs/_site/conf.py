"""Settings of the site. `make site` builds build/site with warnings as errors; it makes no request to other hosts."""

import re
import sys

project, author = "addnorm", "The addnorm developers"
root_doc = "index"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
myst_heading_anchors = 4  # links to a heading, as on GitHub
default_role = "code"  # `name` in a docstring is code, as in Markdown
autodoc_default_options = {"members": True, "exclude-members": "extra_repr"}
autodoc_typehints = "none"  # docstrings state shapes, dtypes and units
napoleon_use_ivar = True
python_maximum_signature_line_length = 100
html_theme = "furo"
html_title = "addnorm"
html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_extra_path = ["extra"]  # the explorer, which docs/_build/site.py exports
html_js_files, html_css_files = ["site.js"], ["site.css"]


def find_comment(name, obj):
    """Return the lines of the `#:` comment of a constant, wherever in the package it is defined."""
    from sphinx.errors import PycodeError  # here, so that the settings are read without Sphinx too
    from sphinx.pycode import ModuleAnalyzer

    for module in [module for key, module in sys.modules.items() if key.startswith("addnorm")]:
        if vars(module).get(name) is obj:
            try:
                comments = ModuleAnalyzer.for_module(module.__name__).find_attr_docs()
            except PycodeError:
                continue
            if ("", name) in comments:
                return comments["", name]
    return []


def write_docstring(app, what, name, obj, options, lines):
    """Change a docstring to reStructuredText. Sphinx calls it before it reads the sections.

    Indented formulas become literal blocks. Of a constant, `lines` is the docstring of its type: its comment takes their place.
    """
    if what == "data":
        lines[:] = find_comment(name.rpartition(".")[2], obj)
    result, indent, is_formula, is_example = [], 0, False, False
    for before, line in zip(["", *lines], lines, strict=False):
        now = len(line) - len(line.lstrip())
        if line and not before and now >= 4 and indent < 4:
            result += ["::", ""]
            is_formula = True
        is_formula = is_formula and (now >= 4 or not line)
        is_example = bool(line) and (is_example or line.lstrip().startswith(">>>"))
        indent = now if line else indent
        result.append(line if is_formula or is_example else _escape(line))
    lines[:] = result


def _escape(line):
    """Let `|` and `**` stand for themselves, and let letters follow code, as in `Row`s."""
    parts = re.split(r"(``.*?``|`[^`]*`)", line)
    for k in range(0, len(parts), 2):
        parts[k] = re.sub(r"\||\*\*", lambda match: "\\" + "\\".join(match[0]), parts[k])
        if k and re.match(r"\w", parts[k]):
            parts[k] = "\\ " + parts[k]
    return "".join(parts)


def setup(app):
    """Register the functions that Sphinx calls."""
    app.connect("autodoc-process-docstring", write_docstring, priority=400)
