"""Triton kernels of n streams: `forward.py`, `backward.py`, `coefficients.py` for both; `operators.py` calls them."""
