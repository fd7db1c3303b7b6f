"""``python -m golden``: calibrate, run, score and capture from the golden LLM, train the reference checkpoint."""

from __future__ import annotations

import click

from golden.accuracy import accuracy_command
from golden.commandline import run
from golden.llm.calibrate import calibrate_command
from golden.llm.capture import capture_command
from golden.llm.generate import generate_command
from golden.llm.perplexity import ablate_command, perplexity_command
from golden.llm.rotations import search_command, study_command
from golden.llm.speed import speed_command
from golden.llm.train import held_out_command, train_command


@click.group()
def main() -> None:
    """NearMem's golden model."""


main.add_command(ablate_command)
main.add_command(accuracy_command)
main.add_command(calibrate_command)
main.add_command(capture_command)
main.add_command(generate_command)
main.add_command(held_out_command)
main.add_command(perplexity_command)
main.add_command(search_command)
main.add_command(speed_command)
main.add_command(study_command)
main.add_command(train_command)

if __name__ == "__main__":
    run(main, "golden")
