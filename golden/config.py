"""Base class of every unit's configuration: one frozen dataclass that golden function and component share.

A field is declared with :func:`integer`, :func:`power_of_two`, :func:`choice` or :func:`flag`, which record its
accepted values; the base class checks them, so that a unit only writes the conditions that tie several fields together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import index
from typing import Any, Self


def integer(default: int, low: int, high: int, doc: str) -> Any:
    """Declare an integer field that accepts ``low..high``."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "doc": doc})


def power_of_two(default: int, low: int, high: int, doc: str) -> Any:
    """Declare an integer field that accepts the powers of two from ``low`` to ``high``, both powers of two."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "power": True, "doc": doc})


def choice(default: str, options: Sequence[str], doc: str) -> Any:
    """Declare a field that accepts one of ``options``."""
    return dataclasses.field(default=default, metadata={"options": tuple(options), "doc": doc})


def flag(default: bool, doc: str) -> Any:
    """Declare a field that is on or off."""
    return dataclasses.field(default=default, metadata={"flag": True, "doc": doc})


class UnitConfig:
    """Configuration of one unit. Subclasses are frozen dataclasses whose fields come from the helpers above.

    Raises
    ------
    ValueError
        One line with the field, the value and what is accepted.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            meta = field.metadata
            if "options" in meta:
                if value not in meta["options"]:
                    raise ValueError(f"{field.name} must be one of {', '.join(meta['options'])}, not {value!r}")
            elif "flag" in meta:
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be true or false, not {value!r}")
            elif "low" in meta:
                try:
                    number = index(value)
                except TypeError:
                    raise ValueError(f"{field.name} must be an integer, not {value!r}") from None
                if not meta["low"] <= number <= meta["high"]:
                    raise ValueError(f"{field.name} must lie in {meta['low']}..{meta['high']}, not {number}")
                if "power" in meta and number & (number - 1):
                    raise ValueError(f"{field.name} must be a power of two, not {number}")
                object.__setattr__(self, field.name, number)
        self.validate()

    def validate(self) -> None:
        """Check the conditions that tie several fields together; raise ValueError with one line."""

    def replace(self, **changes: Any) -> Self:
        """The same configuration with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def with_settings(self, settings: Sequence[str]) -> Self:
        """The same configuration with ``field=value`` texts (of a command line) applied."""
        fields = {field.name: field for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        changes: dict[str, Any] = {}
        for setting in settings:
            name, equals, text = setting.partition("=")
            if not equals:
                raise ValueError(f"a setting must have the form field=value, not {setting!r}")
            if name not in fields:
                raise ValueError(f"{type(self).__name__} has no field {name!r}; it has {', '.join(fields)}")
            meta = fields[name].metadata
            if "options" in meta:
                changes[name] = text
            elif "flag" in meta:
                if text not in ("true", "false"):
                    raise ValueError(f"{name} must be true or false, not {text!r}")
                changes[name] = text == "true"
            else:
                try:
                    changes[name] = int(text, 0)
                except ValueError:
                    raise ValueError(f"{name} must be an integer, not {text!r}") from None
        return self.replace(**changes)

    def describe(self) -> str:
        """The fields that differ from their defaults, for tables: ``lanes=4 in_bits=8``."""
        return " ".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        )
