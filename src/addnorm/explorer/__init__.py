"""The explorer: a local web page that shows the library's own numbers, live.

    addnorm explore

`server.py` answers, `static/` is the page. Needs `addnorm[web]`.
"""
