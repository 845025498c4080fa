"""The explorer: a local web page with the library's numbers, computed on request.

    addnorm explore

- `server`: the web server, its routes and errors; `security` checks every request
- `scheduler`: the order of the computations, and how many run at once
- `stack`, `streams`, `trace`, `recording`, `race`: the data of each view; `params`: the checks of requests
- `static/`: the page, with a folder for each view

Needs `addnorm[web]`.
"""
