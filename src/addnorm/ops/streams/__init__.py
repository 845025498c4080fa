"""The boundary of n residual streams as operators: the write, the next coefficients, the read and its norm in one call.

`schema.py` defines `add_norm_streams` and its backward, `formula.py` is the reference in torch's own operators, `eager.py`
registers it for every device, `autograd.py` has the gradient, `sharding.py` the rules for DTensors. `addnorm.boundary` calls
them.
"""

from addnorm.ops.streams import schema, eager, autograd  # isort: skip  # schemas before the kernels

__all__ = ["autograd", "eager", "schema"]
