"""Helper that runs Python in a process of its own."""

import subprocess
import sys


def run_python(*arguments, check=True, **options):
    """Run Python with these arguments; return the process with what it printed. It must succeed if `check` is True."""
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert process.returncode == 0 or not check, process.stdout + process.stderr[-3000:]
    return process
