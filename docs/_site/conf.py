"""Settings of the site. `make site` builds build/site with warnings as errors; it makes no request to other hosts."""

project, author = "addnorm", "The addnorm developers"
root_doc = "index"
extensions = ["myst_parser"]
myst_heading_anchors = 4  # links to a heading, as on GitHub
html_theme = "furo"
html_title = "addnorm"
html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_extra_path = ["extra"]  # the explorer, which docs/_build/site.py exports
html_js_files = ["site.js"]
