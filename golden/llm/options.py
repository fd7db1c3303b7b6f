"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]

FLOAT = "Hugging Face folder, GGUF or llama2.c file."
ANY = f"{FLOAT[:-1]}, or a file that calibrate wrote."


def checkpoint_options(accepts: str = FLOAT) -> Callable[[Command], Command]:
    """``--checkpoint`` and ``--tokenizer``."""

    def decorate(command: Command) -> Command:
        beside = "By default the one in or beside the checkpoint."
        command = click.option("--tokenizer", type=click.Path(path_type=Path), help=beside)(command)
        return click.option("--checkpoint", type=click.Path(path_type=Path), required=True, help=accepts)(command)

    return decorate


def text_option(purpose: str) -> Callable[[Command], Command]:
    """``--text``."""
    return click.option("--text", type=click.Path(path_type=Path), required=True, help=f"UTF-8 text {purpose}.")
