"""Residual programs: models with several streams, or with computed coefficients, as matrices that are measured and proven.

`carried.py` follows the values that a run carries from the embedding and the sublayers' outputs, `cuts.py` finds the states
between the sublayers, `maps.py` measures what each state and read is of the state before, `result.py` is the result and how it
is printed, and `build.py` makes it from a captured run. `expected.py` computes the matrices of a wiring with the parameters of
the model, `naming.py` compares them with those that were measured, and `deviations.py` says which differ and how.
"""
