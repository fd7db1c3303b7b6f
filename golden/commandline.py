"""What all command lines share: one-line errors with exit status 2, and tables for people or JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import click
from rich.console import Console
from rich.table import Table


class CheckFailed(Exception):
    """A check found a difference: one line, exit status 1."""


def run(command: click.Command, program: str) -> NoReturn:
    """Run a click command: exit status 0, 1 (a check failed) or 2 (a bad request, told in one line)."""
    try:
        status = command.main(prog_name=program, standalone_mode=False)
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except click.exceptions.NoArgsIsHelpError as request:
        click.echo(request.format_message(), err=True)
        status = 2
    except click.ClickException as request:
        status = fail(program, request.format_message())
    except click.Abort:
        status = 130
    except CheckFailed as difference:
        click.echo(f"{program}: {one_line(difference)}", err=True)
        status = 1
    except BrokenPipeError:
        # The reader (head, a pager) has left: not an error. Keep the interpreter from flushing into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as problem:
        named = f"{problem.filename}: " if problem.filename is not None else ""
        status = fail(program, f"{named}{problem.strerror or problem}")
    except (ValueError, OverflowError, TypeError, RecursionError, MemoryError) as problem:
        if os.environ.get("NEARMEM_TRACEBACK"):
            raise
        status = fail(program, str(problem) or type(problem).__name__)
    sys.exit(status if isinstance(status, int) else 0)


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def fail(program: str, message: str) -> int:
    click.echo(f"{program}: error: {one_line(message)}", err=True)
    return 2


def show(rows: Sequence[dict[str, Any]], as_json: bool, title: str = "", columns: Sequence[str] | None = None) -> None:
    """Print ``rows`` as a list of JSON objects, or as a table with the given columns (default: those of the rows)."""
    if as_json:
        click.echo(json.dumps(list(rows), indent=1))
        return
    names = list(columns) if columns else list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title or None, title_justify="left")
    for name in names:
        numeric = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row.get(name)) for name in names))
    # A pipe has no width: give the table what it needs instead of folding it at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError, before any work is done, if no file can be written at ``path``."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(21, "is a directory, a file is needed", str(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(target.parent))


def check_output(path: str | os.PathLike[str], *inputs: str | os.PathLike[str] | None) -> None:
    """:func:`check_writable`, and a ValueError if ``path`` is one of the files that the work reads."""
    check_writable(path)
    for given in inputs:
        if given is not None and os.path.exists(path) and os.path.exists(given) and os.path.samefile(path, given):
            raise ValueError(f"{path}: the output would replace what is read")


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path`` and move it there when the block ends well: never a half-written file."""
    check_writable(path)
    # A link stays a link: what it points to is written.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(target, mode) as file:  # a device or a pipe is written to, never replaced
            yield file
        return
    try:
        handle, name = tempfile.mkstemp(prefix=".nearmem-", dir=target.parent)
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(target)) from None
    try:
        with os.fdopen(handle, mode) as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        try:
            os.replace(name, target)
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, str(target)) from None
    except BaseException:
        os.unlink(name)
        raise
