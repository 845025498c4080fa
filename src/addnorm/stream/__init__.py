"""The residual stream of an existing model: find and prove it, record it, decompose it, ablate sublayers.

- `dataflow`: capture of a run as a graph of values, and observers of running models
- `inspect`, with `find`: residual adds and norms, and their equations with proofs; with `program`: several streams as matrices
- `inspection`: the result, whose parts are streams or a residual program
- `tokens`, `write_terms`, `shares`, `edits`, `outputs`: what the tools below have in common
- `verify` (with `deviations`, `states`), `locate`: comparison with a wiring, with a reference, with a captured tensor
- `record`: `record`, statistics of every sublayer, and `Recording`
- `decompose` (with `decomposition`), `ablate`: the stream as a sum of components; the model without a sublayer
- `program`: models with several streams, their components and statistics
- `models`: models by name, for the command line
"""

from addnorm.stream.dataflow.registered_ops import register_operator
from addnorm.stream.inspection import Inspection
from addnorm.stream.locate import Location
from addnorm.stream.program.result import Program
from addnorm.stream.program.statistics import measure_streams
from addnorm.stream.record.recording import Recording
from addnorm.stream.verify import Verification

__all__ = ["Inspection", "Location", "Program", "Recording", "Verification", "measure_streams", "register_operator"]
