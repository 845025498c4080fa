"""Machinery that every part of the library shares and that knows nothing of Add & Norm.

- `arguments`: checks of arguments, with one-sentence errors
- `files`: atomic writing of files
- `jsonio`: JSON with NaN and infinity
- `numbers`: numbers as text
- `optional`: imports of optional packages
- `tables`: tables and paragraphs for terminals, notebooks, plain text and Markdown
- `timing`: interleaved timing of several variants
"""
