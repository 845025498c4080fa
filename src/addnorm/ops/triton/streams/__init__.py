"""The Triton kernels of n streams: `forward.py`, `backward.py`, what these share, and their launches in `operators.py`."""
