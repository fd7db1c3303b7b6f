"""The key/value caches by name, and the options that choose one on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from golden.llm.kvcache import CacheFactory, DenseCache, NarrowCache
from golden.llm.rotated import Patterns, RotatedCache, RotatedConfig

SCHEMES: dict[str, CacheFactory] = {"dense": DenseCache, "int4": NarrowCache, "rotated": RotatedCache}
"""The cache schemes by the name that ``--kv`` takes."""


class Cache(NamedTuple):
    """A cache that was asked for: its scheme's name, and what builds it."""

    name: str
    build: CacheFactory


def choose(kv: str, given: dict[str, Any], patterns: Path | None) -> Cache:
    """The cache of a scheme with settings (None where not set). ValueError for settings that it does not have."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if kv != "rotated":
        for name in (*chosen, *(["signs"] if patterns is not None else [])):
            raise ValueError(f"--{name.replace('_', '-')} needs --kv rotated, not {kv}")
        return Cache(kv, SCHEMES[kv])
    return Cache(
        kv,
        partial(
            RotatedCache,
            config=RotatedConfig(**chosen),
            patterns=None if patterns is None else Patterns.load(patterns),
        ),
    )


def kv_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--kv`` and the settings of the scheme, which the command gets as one argument ``kv``, a :class:`Cache`."""
    items = [item for item in fields(RotatedConfig) if item.name != "seed"]

    @wraps(command)
    def wrapped(*positional: Any, kv: str, signs: Path | None, **given: Any) -> None:
        chosen = {item.name: given.pop(item.name) for item in items}
        command(*positional, kv=choose(kv, chosen, signs), **given)

    decorated: Callable[..., None] = wrapped
    decorated = click.option(
        "--signs", type=click.Path(path_type=Path), help="rotated: sign patterns that search-signs wrote."
    )(decorated)
    for item in reversed(items):
        meta = item.metadata
        decorated = click.option(
            f"--{item.name.replace('_', '-')}",
            type=click.IntRange(meta["low"], meta["high"]),
            help=f"rotated: {meta['doc']}.  [default: {item.default}]",
        )(decorated)
    return click.option(
        "--kv", type=click.Choice(list(SCHEMES)), default="dense", show_default=True, help="Key/value cache."
    )(decorated)
