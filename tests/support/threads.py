"""Helper that runs a coroutine in a new thread: while a browser is open, playwright's event loop occupies the main thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor


def run_in_thread(coroutine):
    """Return the result of a coroutine."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
