"""Reversible fusion of the Add & Norms of an existing model, with proof that it computes the same.

`fuse` compiles a model with the frontend of torch.compile. `backend` receives its graphs: `graph` runs each on fake tensors to
get its data flow, `pattern` finds the Add & Norms (`boundary`) in it, `fused_call` picks the call that computes the same,
`rewrite` inserts it, and `encoder` opens torch's fused encoder layer first. `proof` then compares outputs and gradients with
those of the original model (`runs`), within a `tolerance` from a float64 copy (`rng_replay`). `benchmark` measures time
and memory, and `result` displays the results.
"""
