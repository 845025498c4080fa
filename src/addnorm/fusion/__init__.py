"""Fusing the Add & Norms of an existing model, with proof that it computes the same, and reversibly.

`fuse` compiles a model with the frontend of torch.compile. `backend` receives its graphs: `graph` runs each on fake tensors to
get its data flow, `pattern` finds the Add & Norms (`boundary`) in it, `fused_call` picks the call that computes the same,
`rewrite` inserts it, and `encoder` opens torch's fused encoder layer first. `proof` then compares outputs and gradients with
those of the model before (`runs`), within a `tolerance` that comes from a float64 copy (`rng_replay`). `benchmark` measures time
and memory, and `result` displays the results.
"""
