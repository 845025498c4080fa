"""Statistics of every sublayer of a running model, step by step.

- `schema`: roles and statistics as data; the types of sites and rows (`tokens` computes the statistics)
- `probes`: the values to measure; `recorder`: the `record` block
- `forward`, `program_forward` (of several streams), `gradients`: observers and hooks that measure a forward and its backward
- `sample`: memory map and balance of a step, from a sample of its tokens
- `measurements`, `recording`: the numbers, and `Recording` around them; `store`: files; `plot`, `axes`: drawings
"""
