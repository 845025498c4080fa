"""Helpers that several test files share, and the programs that tests run in processes of their own."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
