"""Fixtures that several test files use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public data that accompanies the repository: $NEARMEM_SHARED, else ``../shared``."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("NEARMEM_SHARED", default))
    if not (folder / "data").is_dir():
        pytest.skip("no shared data: set NEARMEM_SHARED to its folder")
    return folder
