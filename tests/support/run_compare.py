"""Program that runs `addnorm compare` with few untrained stacks, frequent checkpoints and no report; tests start and kill it."""

import signal
import sys
from functools import partial

from addnorm import lab, report
from addnorm_cli import main
from support.lab_runs import FEW_STACKS

if __name__ == "__main__":
    # Tests that run in the background of a shell inherit that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for setting in FEW_STACKS:
        setattr(*setting)
    lab.compare = partial(lab.compare, seconds=0.1)
    report.build_comparison_page, report.write = (lambda comparison: comparison), (lambda page, path: path)
    main(sys.argv[1:])
