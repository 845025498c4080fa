"""The residual stream of any model: where it runs, what is recorded of it."""
