"""`addnorm explore` as a process on a free port, for tests of the server and of the page.

with Explorer() as explorer:
    explorer.ask("POST", "/api/stack", {"placement": "pre"}).json()
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from support.commands import without_announcements

START = 60  # seconds until the process prints its address

RACING = """
import itertools, time
from addnorm.explorer import race

def endless(runs):
    for k in itertools.count():
        yield {"event": "step", "step": k}
        time.sleep(0.02)

race.run_race = endless
"""
"""A race that never ends replaces the training."""


def read(file):
    """Return the text of an open file, whose position is that of the process that writes it."""
    return os.pread(file.fileno(), 1 << 20, 0).decode()


class Explorer:
    """Process of `addnorm explore`, which ends with the `with` block.

    Args:
        arguments: command-line arguments of `addnorm explore`; `--port 0` is added unless they include a port.
        before: Python code that runs first in the process.
    """

    def __init__(self, *arguments, before=""):
        arguments = arguments if "--port" in arguments else ("--port", "0", *arguments)
        code = f"{before}\nfrom addnorm_cli import main\nmain(['explore', *{arguments!r}])"
        self._stdout, self._stderr = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115  # for as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-W", "error", "-c", code], stdin=subprocess.DEVNULL, stdout=self._stdout, stderr=self._stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        end = time.monotonic() + START
        while (found := re.search(r"The explorer is at (\S+)\n", read(self._stdout))) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                self.end(signal.SIGKILL)
                raise AssertionError(f"the explorer does not listen: {self.stderr}")
            time.sleep(0.05)
        self.url = found[1].partition("#")[0]  # the fragment is that of the view
        split = urlsplit(self.url)
        self.host, self.port, self.token = split.hostname, split.port, split.query.removeprefix("token=")

    @property
    def stderr(self):
        """Return what the process has printed on stderr."""
        return self._last_words if self._stderr.closed else without_announcements(read(self._stderr))

    def ask(self, method, path, body=None):
        """Send one request on a new connection and return the response. The body is sent as JSON."""
        return httpx2.request(method, f"http://{self.host}:{self.port}{path}", json=body, timeout=30, trust_env=False)

    def connect(self, timeout=30):
        """Open a connection."""
        return socket.create_connection((self.host, self.port), timeout)

    def memory(self):
        """Return the resident memory in bytes; Linux only."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def end(self, by=signal.SIGINT):
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(by)
        try:
            return self.process.wait(10.0)
        finally:
            self.process.kill()
            self.process.wait()
            self._last_words = self.stderr
            self._stdout.close()
            self._stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


@contextmanager
def serve_in_thread(recordings=()):
    """Yield the address of a server that runs in a thread of this process, which starts faster than a process."""
    import uvicorn

    from addnorm.explorer.scheduler import Scheduler
    from addnorm.explorer.server import create_app

    scheduler = Scheduler()
    app = create_app([*recordings], scheduler=scheduler)
    config = uvicorn.Config(
        app, http="h11", loop="asyncio", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            scheduler.close()
            server.should_exit = True
            thread.join()
