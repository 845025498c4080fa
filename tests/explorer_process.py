"""`addnorm explore` as a process of its own, on a free port."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def running(*arguments):
    """Its address, while it runs."""
    command = [sys.executable, "-W", "error", "-m", "addnorm.cli", "explore", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline()
            found = re.search(r"http://\S+?(?=/?\s)", said)
            assert found, said + process.stderr.read()
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
