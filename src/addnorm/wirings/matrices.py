"""Rows and matrices of coefficients, and a fast check of constant ones."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from addnorm.wirings.factors import Factor

Vector = tuple[Factor, ...]
Matrix = tuple[Vector, ...]


def unit(n: int, k: int) -> Vector:
    """Return n entries of which entry k is 1, counted from the end if negative, and the others are 0."""
    return (0.0,) * (k % n) + (1.0,) + (0.0,) * (n - 1 - k % n)


def identity(n: int) -> Matrix:
    """Return the matrix that keeps n streams as they are."""
    return tuple(unit(n, k) for k in range(n))


def append_zero(n: int) -> Matrix:
    """Return the matrix that keeps n streams and appends one of zeros."""
    return (*identity(n), (0.0,) * n)


def find_place(matrix: str, k: int, j: int) -> str:
    """Return the name of entry (k, j) of a matrix, such as "mix_0_1"; the vector "inject" has no k: "inject_1"."""
    return f"inject_{j}" if matrix == "inject" else f"{matrix}_{k}_{j}"


def is_constant(row: Any) -> TypeGuard[tuple[float, ...]]:
    """Return whether a row is a tuple of finite floats, fast: a stack of 96 sublayers has 300,000 entries."""
    return type(row) is tuple and {*map(type, row)} <= {float} and all(map(math.isfinite, row))
