"""Fair comparisons of residual wirings by small training runs.

    from addnorm import lab
    comparison = lab.compare(["post_ln", "pre_ln"], out="runs")

`compare` trains the `Run`s of a `Protocol` on a `Text` and returns a `Comparison`: the numbers and the sentences that follow from
them. `InitProbe` measures one stack before training, `StreamsProbe` one with several streams. Requires `addnorm[lab]`.
"""

from addnorm.lab.compare import RunError, compare
from addnorm.lab.comparison import Comparison
from addnorm.lab.data import Text, python_docs, read_text
from addnorm.lab.init_probe import InitProbe
from addnorm.lab.run import FULL, ILLUSTRATION, Protocol, Run
from addnorm.lab.streams_probe import StreamsProbe
from addnorm.lab.train import train

__all__ = [
    "FULL",
    "ILLUSTRATION",
    "Comparison",
    "InitProbe",
    "Protocol",
    "Run",
    "RunError",
    "StreamsProbe",
    "Text",
    "compare",
    "python_docs",
    "read_text",
    "train",
]
