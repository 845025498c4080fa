"""Which streams a model has: norms, residual adds, rows, and the proof."""
