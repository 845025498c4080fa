"""Runs of a model as data: `FlowCapture(model).run(args, kwargs)` returns a `Flow` of operators and values.

- `operators`: the table of what each operator of torch does; `graph`: values, operators and module calls of a run
- `flow_capture`, `frames`, `memory`, `wrappers`, `fused_ops`, `registered_ops`: how a run is captured, with writes in
  place and the steps of fused operators
- `arithmetic`: views, factors and sums; `replay`: operators run again on other inputs, and cuts that cancel
- `observers`: functions that get the outputs of selected operators in later forwards
- `snapshot`, `holders`, `state`: the state that a run changes, saved before it and restored after it
"""
