"""Settings of the site. `make site` builds build/site with warnings as errors; it makes no request to other hosts."""

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
html_js_files = ["site.js"]


def show_formulas(app, what, name, obj, options, lines):
    """Make the indented formulas of a docstring literal blocks. Sphinx calls it before it reads the sections."""
    result, indent = [], 0
    for before, line in zip(["", *lines], lines, strict=False):
        now = len(line) - len(line.lstrip())
        if line and not before and now >= 4 and indent < 4:
            result += ["::", ""]
        indent = now if line else indent
        result.append(line)
    lines[:] = result


def setup(app):
    """Register the functions that Sphinx calls."""
    app.connect("autodoc-process-docstring", show_formulas, priority=400)
