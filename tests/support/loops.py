"""Coroutines of tests, in a thread of their own: while a browser is open, playwright's loop is that of the main thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor


def apart(coroutine):
    """What a coroutine returns."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
