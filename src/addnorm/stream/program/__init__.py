"""Residual programs: models with several streams, or with computed coefficients, as matrices that are measured and proven.

    R = N_in(C X)    what a sublayer reads        X' = N_out(A X + B N_branch(f(R)))    the streams after it

`carried.py` finds the values of a run that are sums of multiples of the embedding and of the sublayers' outputs. `spine.py`
finds what the sublayers read and write, `cuts.py` the states X between them, and `maps.py` measures C, A and B. `result.py` is
the result and how it is printed, and `build.py` makes it from a captured run. `expected.py` computes the matrices of a wiring
with the parameters of the model, `naming.py` compares them with those that were measured, and `deviations.py` says which differ
and how.
"""
