"""Texts as rows of token ids, for scoring and for calibration."""

from __future__ import annotations

import os
from pathlib import Path

from golden.llm.config import ModelConfig
from golden.llm.tokenizer import Tokenizer


def read_text(path: str | os.PathLike[str]) -> str:
    """A UTF-8 text file, with one-line errors."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such text file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: byte {error.start} cannot be decoded") from None


def sequences(words: Tokenizer, text: str, length: int, tokens: int, skip: int = 0) -> list[list[int]]:
    """``tokens`` tokens of a text in rows of ``length``, after the first ``skip`` tokens of it.

    Each row opens with the tokenizer's opening token, where it knows one (which counts as one of its tokens), and goes
    on where the row before ended. The last row may be shorter, but has at least two tokens.

    Raises ValueError if the text is too short.
    """
    opening = [] if words.bos is None else [words.bos]
    # Twelve characters a token is more than any text needs; the whole of a long one need not be encoded.
    wanted = skip + tokens
    ids = words.encode(text[: 12 * wanted], bos=False)
    if len(ids) < wanted:
        ids = words.encode(text, bos=False)
    rows, place, left = [], skip, tokens
    while left >= 2:
        count = min(length, left) - len(opening)
        row = opening + ids[place : place + count]
        if len(row) < len(opening) + count:
            raise ValueError(f"the text has {len(ids)} tokens, too few for {tokens} in rows of {length} after {skip}")
        rows.append(row)
        place, left = place + count, left - len(row)
    return rows


def consumed(words: Tokenizer, rows: list[list[int]]) -> int:
    """Tokens of the text itself in rows of :func:`sequences`: what to ``skip`` to go on after them."""
    return sum(map(len, rows)) - (len(rows) if words.bos is not None else 0)


def check_vocabulary(words: Tokenizer, config: ModelConfig) -> None:
    """Raise ValueError if the tokenizer knows ids that the model does not."""
    if words.vocab > config.vocab:
        raise ValueError(
            f"the tokenizer has {words.vocab} entries and the checkpoint only {config.vocab}; "
            "they do not belong together"
        )
