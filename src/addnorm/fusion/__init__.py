"""Reversible fusion of the Add & Norms of an existing model, with proof that it computes the same.

`fuse` compiles a model with the frontend of torch.compile. `backend` receives the graphs. For each, `encoder` first decomposes
torch's fused encoder layer, and `graph` gets the data flow by a run on fake tensors. `pattern` finds the Add & Norms (`match`),
`streams` those of n streams, `fused_call` chooses the call that computes the same, and `rewrite` inserts it. `call_proof` proves
each call by itself, `wiring` that nothing else has changed.

`proof` compares outputs and gradients with those of the original model (`runs`). The `tolerance` follows from a copy in float64
that draws the same random numbers (`rng_replay`). `benchmark` measures time and memory, and `result` displays the results.
"""
