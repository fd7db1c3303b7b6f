"""A guard that raises wherever the golden model holds a floating-point number while it runs (DESIGN: integer-only means
integer-only).

It traces every line of every function of ``golden`` and looks at the local variables and at what is returned. Two
things may hold floats: ``fixedpoint``, whose products run through BLAS after their bound is proven (and which finds bit
lengths and roots exactly); and what a configuration derives once from constants (properties, cached functions), because
that is hardware that was built, not a number that was computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

#: Modules whose functions may use floating point, and functions that only build constant tables.
ALLOWED_MODULES = {"golden.fixedpoint"}


class FloatFound(AssertionError):
    """A floating-point value in the integer pipeline."""


def _floating(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fc" and value.size > 0
    return isinstance(value, float | complex | np.floating | np.complexfloating)


def _search(value: Any, depth: int = 2) -> bool:
    if _floating(value):
        return True
    if depth and isinstance(value, tuple | list):
        return any(_search(item, depth - 1) for item in value)
    return False


@contextmanager
def integers_only() -> Iterator[list[str]]:
    """Raise :class:`FloatFound` as soon as a function of ``golden`` holds a float. Yields the names of the functions
    that were watched, so that a test can tell that it watched something."""
    watched: list[str] = []

    def local(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        for name, value in frame.f_locals.items():
            if _search(value):
                where = f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
                raise FloatFound(f"{where} line {frame.f_lineno}: {name} holds floating point")
        if event == "return" and _search(argument):
            raise FloatFound(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname} returns floating point")
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("golden.") or module in ALLOWED_MODULES:
            return None
        watched.append(f"{module}.{frame.f_code.co_qualname}")
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield watched
    finally:
        sys.settrace(before)
