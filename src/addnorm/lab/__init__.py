"""Wirings compared: small real training runs, and what is measured on them.

    from addnorm import lab
    found = lab.compare(["post_ln", "pre_ln"], out="runs")

`compare` trains and measures, `Comparison` has the numbers and what follows from them. Needs `addnorm[lab]`.
"""

from addnorm.lab.compare import RunError, compare
from addnorm.lab.comparison import Comparison
from addnorm.lab.data import Text, read, topics
from addnorm.lab.init_probe import Flip
from addnorm.lab.protocol import FULL, ILLUSTRATION, Protocol
from addnorm.lab.run import Run
from addnorm.lab.train import train

__all__ = [
    "FULL",
    "ILLUSTRATION",
    "Comparison",
    "Flip",
    "Protocol",
    "Run",
    "RunError",
    "Text",
    "compare",
    "read",
    "topics",
    "train",
]
