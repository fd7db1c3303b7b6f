"""Bad requests are told in one line with exit status 2, and no file is half-written or replaced by mistake."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from golden.commandline import atomic_write
from golden.fixedpoint import check
from golden.llm.capture import capture
from golden.llm.checkpoint import REFERENCE
from golden.nonlinear.requantize import RequantizeConfig, requantize
from golden.nonlinear.softmax import SoftmaxConfig, softmax


def run(*arguments, cwd):
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("hw", "emit", "exp", "--set", "lanes=0", "-o", "f.v"), "hw: error: lanes must lie in 1..128, not 0"),
        (("hw", "emit", "nothing", "-o", "f.v"), "hw: error: there is no unit 'nothing'; the catalog has exp"),
        (("hw", "emit", "exp"), "hw: error: Missing option '-o' / '--output'."),
        (("hw", "emit", "exp", "-o", "no/f.v"), "hw: error: no: no such folder"),
        (("hw", "emit", "exp", "-o", "."), "hw: error: .: is a directory, a file is needed"),
        (("hw", "emit", "exp", "-o", "f.core", "--core"), "hw: error: --core writes f.core beside the Verilog"),
        (("hw", "verilog", "exp", "nothing", "-o", "."), "hw: error: there is no unit 'nothing'"),
        (("golden", "generate", "--checkpoint", "gone", "--prompt", "x", "--tokens", "1"), "golden: error: gone"),
    ],
)
def test_bad_request(arguments, message, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert done.stdout == "" and not list(tmp_path.iterdir())


def test_both_outputs_are_checked_before_either_is_written(tmp_path):
    (tmp_path / "y.core").mkdir()
    done = run("hw", "emit", "exp", "-o", "y.v", "--core", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "y.v").exists()


def test_a_pipe_is_written_to_and_a_link_stays_a_link(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    with atomic_write(pipe) as file:
        file.write("text")
    reader.join()
    assert got == ["text"] and pipe.is_fifo()
    (tmp_path / "link").symlink_to("target")
    with atomic_write(tmp_path / "link") as file:
        file.write("text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    (tmp_path / "f").write_text("old")
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "f") as file:
        file.write("new")
        raise RuntimeError
    assert (tmp_path / "f").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_unsigned_words_beyond_int64_do_not_wrap_into_range():
    with pytest.raises(OverflowError, match="x holds 18446744073709551615"):
        check("x", np.array([2**64 - 1], np.uint64), 16)


def test_single_numbers_are_not_rows():
    with pytest.raises(ValueError, match="^scores must be rows, not a single number$"):
        softmax(SoftmaxConfig(), 3)
    with pytest.raises(ValueError, match="^x must be rows, not a single number$"):
        requantize(RequantizeConfig(), 3)


def test_empty_text_is_refused():
    with pytest.raises(ValueError, match="the text is empty"):
        capture(REFERENCE, "", tokens=4)
