"""Search for the residual streams in a captured run: norms, residual adds, sublayers, and the proof of each equation.

A `Row` is the equation of one sublayer: x' = N_out(a x + b N_branch(f(c N_in(x)))), with norms N and factors a, b, c.

`inspect.py` captures one run of a model (`stream.dataflow`) and calls the other files in order: `norms.py` matches norms,
`adds.py` residual adds, `sublayers.py` what each sublayer reads, computes and writes, `chain.py` joins adds into streams,
`stream_layout.py` finds their features and tokens, `passages.py` checks that whole tokens pass, `unexplained.py` lists the
operators that no `Row` describes, `equation_errors.py` proves every equation in float64, `naming.py` names the wiring,
`reasons.py` explains what no `Row` expresses, and `remarks.py` lists other properties. `inspection.py` holds the result.
"""
