"""Runs of a model as data (`capture.py`), and observers of later runs (`observers.py`).

`graph.py` has the values, operators and module calls of a run, `frames.py` tracks the calls, `memory.py` follows in-place writes,
`fused_ops.py` decomposes fused operators, and `snapshot.py` restores what a run changes.
"""
