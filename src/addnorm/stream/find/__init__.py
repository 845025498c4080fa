"""Finder of residual streams: norms, residual adds, sublayers, rows, and the proof of each row.

`inspect.py` captures one run of a model (`stream.dataflow`) and calls the other files in order: `moves.py` removes cuts and joins
that cancel, `norms.py` matches norms, `adds.py` residual adds, `sublayers.py` what each sublayer reads, computes and writes,
`chain.py` joins adds into streams, `coverage.py` lists the steps that are in no row, `closure.py` proves every row in float64,
`naming.py` names the wiring, and `diagnostics.py` explains the parts that no row expresses. `operators.py` holds the tables of
torch's operators; `inspection.py` holds the result.
"""
