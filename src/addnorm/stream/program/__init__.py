"""Residual programs: models with several streams, or with computed coefficients, as matrices that are measured and proven.

`carried.py` follows the values that a run carries from the embedding and the sublayers' outputs, `cuts.py` finds the states
between the sublayers, `maps.py` measures what each state and read is of the state before, `result.py` is the result and how it
is printed, `build.py` makes it from a captured run, and `naming.py` compares it with the wirings of the catalog.
"""
