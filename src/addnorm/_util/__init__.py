"""Helpers that every part of the library shares. They do not depend on Add & Norm.

- `arguments`: checks of arguments, with one-sentence errors
- `blocks`: paragraphs, tables and findings as data
- `charts`: charts as data
- `files`: atomic writing of files
- `jsonio`: JSON with NaN and infinity
- `memory`: free memory of the machine
- `norms`: the kinds of norms
- `numbers`: numbers as text
- `optional`: imports of optional packages
- `render`: blocks in terminals, notebooks, plain text and Markdown
- `timing`: interleaved timing of several variants
- `torch_internals`: undocumented parts of torch
"""
