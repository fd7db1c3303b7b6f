"""The build folder: every tool run is a job in a folder of its own, found again by its content."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from golden.commandline import CheckFailed, atomic_write

#: Checkout that holds the packages; its build folder holds all that can be made again.
ROOT = Path(__file__).resolve().parent.parent

#: Environment variable that puts the folder elsewhere.
VARIABLE = "NEARMEM_SYNTH_BUILD"


class ToolFailed(CheckFailed):
    """A tool ended with an error: one line that names the unit, the tool and its log."""


def build_folder() -> Path:
    """``build/synth`` of the checkout (of the current folder, when the packages are installed without one)."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).resolve()
    base = ROOT if (ROOT / "hw" / "catalog.py").is_file() and os.access(ROOT, os.W_OK) else Path.cwd()
    return base / "build" / "synth"


def shown(path: Path) -> str:
    """A path as a message shows it: relative to the current folder where that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def digest(*parts: bytes | str) -> str:
    """Hexadecimal name of a content."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:20]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two commands that need the same result make it once."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Job:
    """One chain of tool runs with a result.

    Parameters
    ----------
    base : Path
        The build folder; tools run in it and get relative names (YoWASP's sandbox does not see every folder).
    name : str
        Start of the folder's name, for people.
    files : mapping
        Name -> text of each input file.
    script : str
        Yosys script, one command a line, in which ``@/file`` is a file of the job.
    key : sequence of str
        Whatever else the result depends on: tool versions, the content of shared inputs.
    """

    def __init__(self, base: Path, name: str, files: Mapping[str, str], script: str, key: Sequence[str]) -> None:
        self.base, self.name, self.files = base, name, dict(files)
        content = [text for item in sorted(self.files.items()) for text in item]
        self.folder = base / "jobs" / f"{name}-{digest(*key, script, *content)}"
        self.files["script.ys"] = script.replace("@/", self.path(""))

    def path(self, file: str) -> str:
        """Name of one of the job's files as its tools see it."""
        return f"jobs/{self.folder.name}/{file}"

    def read(self, file: str) -> str:
        return (self.folder / file).read_text()

    def result(self, make: Callable[[Job], dict[str, Any]], needs: Sequence[str] = ()) -> dict[str, Any]:
        """The stored result, or that of ``make``, which runs in a locked folder that holds the input files.

        A failure stores nothing; the folder stays, for its log. ``needs`` names files that must be there too.
        """
        stored = self.folder / "result.json"
        with locked(self.folder):
            if stored.is_file() and all((self.folder / name).is_file() for name in needs):
                try:
                    return json.loads(stored.read_text())
                except ValueError:
                    pass
            for name, text in self.files.items():
                (self.folder / name).write_text(text)
            result = make(self)
            with atomic_write(stored) as file:
                json.dump(result, file, indent=1)
            return result
