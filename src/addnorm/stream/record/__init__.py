"""Statistics of every sublayer of a running model, step by step.

- `schema`: roles and statistics as data; the types of sites and rows
- `statistics`: the statistics, computed from tensors
- `probes`: the values to measure, from an inspection; `recorder`: the `record` block
- `forward`, `gradients`: observers and hooks that measure a forward and its backward
- `program_probes`, `program_forward`, `program_sample`: the same for several streams, whose matrices are those of one forward
- `sample`: memory map and balance of a step, from a sample of its tokens
- `measurements`, `recording`: the numbers, and `Recording` around them; `store`: files; `plot`, `axes`: drawings
"""
