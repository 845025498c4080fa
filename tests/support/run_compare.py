"""Program that runs `addnorm compare` with few untrained stacks, frequent checkpoints and no report; tests start and kill it."""

import signal
import sys
from functools import partial

from addnorm import lab, report
from addnorm.lab import theory
from addnorm_cli import main

if __name__ == "__main__":
    # Tests that run in the background of a shell inherit that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    theory.DEPTHS, theory.WIRINGS, theory.STREAM_WIRINGS = (2,), (), ()
    lab.compare = partial(lab.compare, seconds=0.1)
    report.build_comparison_page, report.write = (lambda comparison: comparison), (lambda page, path: path)
    main(sys.argv[1:])
