"""Finder of residual streams: norms, residual adds, sublayers, rows, and the proof of each row.

`inspect.py` captures one run of a model (`stream.dataflow`) and calls the other files in order: `norms.py` matches norms,
`adds.py` residual adds, `sublayers.py` what each sublayer reads, computes and writes, `chain.py` joins adds into streams,
`closure.py` proves every row in float64, `naming.py` names the wiring, and `diagnostics.py` explains the parts that no row
expresses. `operators.py` holds the tables of torch's operators; `inspection.py` holds the result.
"""
