"""Planted faults: the project's own sources with one place changed, so that a proof that cannot fail is found."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def mutant(name: str, changes: Mapping[str, str], **names: Any) -> ModuleType:
    """The module ``name`` with each text of ``changes`` replaced, and with the given global names bound to something
    else (a class of another mutant, say). The original stays as it is.

    Raises ValueError if a text does not occur exactly once: the source has moved on, and the fault has to follow.
    """
    source = inspect.getsource(importlib.import_module(name))
    for old, new in changes.items():
        if source.count(old) != 1:
            raise ValueError(f"the planted fault in {name} no longer applies: {old!r} occurs {source.count(old)} times")
        source = source.replace(old, new)
    module = ModuleType(f"{name}.mutant")
    exec(compile(source, f"{name.rsplit('.', 1)[-1]}_mutant.py", "exec"), module.__dict__)
    module.__dict__.update(names)
    return module
