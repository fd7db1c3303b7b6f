"""Text to token ids and back: ``tokenizer.json`` of Hugging Face, GGUF files, and llama2.c's ``tok512.bin``."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import isnan
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    bos: int | None
    """The id that opens a text, or None where the model knows none."""
    vocab: int

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of ``text``, opened by :attr:`bos` if wanted and known."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens give nothing, incomplete UTF-8 gives U+FFFD."""


class LibraryTokenizer:
    """A ``tokenizers.Tokenizer`` and the id that opens a text, or None."""

    def __init__(self, library: Any, bos: int | None):
        self._library = library
        self.vocab: int = library.get_vocab_size()
        self.bos = bos

    def encode(self, text: str, bos: bool = True) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return [self.bos, *ids] if bos and self.bos is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._library.decode(list(ids), skip_special_tokens=True)
        return text


class HuggingFaceTokenizer(LibraryTokenizer):
    """A ``tokenizer.json``, through the ``tokenizers`` library.

    The opening token is the one the file's own post-processor adds; failing that, ``bos_token`` of the
    ``tokenizer_config.json`` beside it; failing that file, ``<s>`` or ``<|begin_of_text|>`` if known.
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Library

        try:
            library = Library.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise ValueError(f"{path}: not a tokenizer.json ({str(error).splitlines()[0]})") from None
        super().__init__(library, None)
        self.bos = self._find_bos(path)

    def _find_bos(self, path: Path) -> int | None:
        added: list[int] = self._library.encode("").ids
        if added:
            return added[0]
        settings_path = path.with_name("tokenizer_config.json")
        names: list[Any] = ["<s>", "<|begin_of_text|>"]
        if settings_path.is_file():
            try:
                settings = json.loads(settings_path.read_text(encoding="utf-8"))
                name = settings.get("bos_token")
                names = [name.get("content") if isinstance(name, dict) else name]
                if settings.get("add_bos_token") is False:
                    names = []
            except (UnicodeDecodeError, json.JSONDecodeError, AttributeError):
                raise ValueError(f"{settings_path}: a JSON object was expected") from None
        known = (self._library.token_to_id(name) for name in names if isinstance(name, str))
        return next((found for found in known if found is not None), None)


class Llama2cTokenizer:
    """llama2.c's export of a SentencePiece BPE: pieces with scores, merged best score first.

    Ids 0, 1, 2 are unknown, begin and end; 3 to 258 are the bytes that spell what no piece covers.
    """

    bos: int | None = 1
    _FIRST_BYTE = 3

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float], prefix: str = " "):
        first = self._FIRST_BYTE
        if [*pieces[first : first + 256]] != [b"<0x%02X>" % byte for byte in range(256)]:
            raise ValueError("entries 3 to 258 are not the 256 bytes")
        self.vocab, self.pieces = len(pieces), pieces
        self._scores = scores
        self._prefix = prefix  # SentencePiece puts a space before the first word
        self._bytes = [b""] * first + [bytes([byte]) for byte in range(256)] + [*pieces[first + 256 :]]
        self._ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}

    @classmethod
    def from_file(cls, path: Path) -> Llama2cTokenizer:
        """Read a ``tok*.bin``: the longest piece's length, then each piece's score, length and bytes."""
        data = path.read_bytes()
        pieces: list[bytes] = []
        scores: list[float] = []
        place = 4
        while place < len(data):
            if place + 8 > len(data):
                raise ValueError(f"{path}: truncated in entry {len(pieces)}")
            score, length = struct.unpack_from("<fi", data, place)
            place += 8
            if not 0 <= length <= 4096 or isnan(score):
                raise ValueError(f"{path}: not a llama2.c tokenizer: entry {len(pieces)} is malformed")
            if place + length > len(data):
                raise ValueError(f"{path}: truncated in entry {len(pieces)}")
            pieces.append(data[place : place + length])
            scores.append(score)
            place += length
        try:
            return cls(pieces, scores)
        except ValueError as error:
            raise ValueError(f"{path}: not a llama2.c tokenizer: {error}") from None

    def encode(self, text: str, bos: bool = True) -> list[int]:
        ids: list[int] = []
        for character in f"{self._prefix}{text}" if text else "":
            spelt = character.encode()
            known = self._ids.get(spelt)
            ids += [known] if known is not None else [self._FIRST_BYTE + byte for byte in spelt]
        merged = self._merge(ids)
        return [1, *merged] if bos else merged

    def _merge(self, ids: list[int]) -> list[int]:
        """Join neighbours while some piece spells both: best score first, the leftmost of equal scores."""
        following = [*range(1, len(ids)), -1]
        preceding = list(range(-1, len(ids) - 1))
        heap: list[tuple[float, int, int, int, int]] = []

        def offer(i: int) -> None:
            j = following[i]
            piece = self._ids.get(self._bytes[ids[i]] + self._bytes[ids[j]]) if j >= 0 else None
            if piece is not None:
                heappush(heap, (-self._scores[piece], i, ids[i], ids[j], piece))

        for i in range(len(ids)):
            offer(i)
        gone = -1
        while heap:
            _, i, left, right, piece = heappop(heap)
            j = following[i]
            if ids[i] != left or j < 0 or ids[j] != right:
                continue  # one of the two was merged with another neighbour since
            ids[i], ids[j] = piece, gone
            following[i] = following[j]
            if following[j] >= 0:
                preceding[following[j]] = i
            offer(i)
            if preceding[i] >= 0:
                offer(preceding[i])
        return [token for token in ids if token != gone]

    def decode(self, ids: Sequence[int]) -> str:
        spelt = b"".join(self._bytes[i] for i in ids)
        text = spelt.decode("utf-8", errors="replace")
        return text.removeprefix(self._prefix) if ids and ids[0] == self.bos else text


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a ``tokenizer.json``, a folder that holds one, that of a GGUF file, or a llama2.c one (any other file)."""
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such tokenizer")
    if path.suffix == ".gguf":
        from golden.llm.gguf_file import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else Llama2cTokenizer.from_file(path)


def pack(tokenizer: Tokenizer) -> str:
    """A tokenizer as JSON text, from which :func:`unpack` makes an equal one."""
    if isinstance(tokenizer, LibraryTokenizer):
        return json.dumps({"kind": "library", "bos": tokenizer.bos, "library": tokenizer._library.to_str()})
    if isinstance(tokenizer, Llama2cTokenizer):
        pieces = [piece.hex() for piece in tokenizer.pieces]
        kept = {"kind": "llama2c", "pieces": pieces, "scores": list(tokenizer._scores), "prefix": tokenizer._prefix}
        return json.dumps(kept)
    raise TypeError(f"a {type(tokenizer).__name__} cannot be packed")


def unpack(text: str) -> Tokenizer:
    """The tokenizer that :func:`pack` packed. Raises ValueError for any other text."""
    from tokenizers import Tokenizer as Library

    try:
        found = json.loads(text)
        if found["kind"] == "library":
            return LibraryTokenizer(Library.from_str(found["library"]), found["bos"])
        if found["kind"] == "llama2c":
            return Llama2cTokenizer([bytes.fromhex(x) for x in found["pieces"]], found["scores"], found["prefix"])
        raise ValueError(f"kind {found['kind']!r}")
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"not a packed tokenizer ({str(error).splitlines()[0]})") from None


def find_tokenizer(checkpoint: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint: a GGUF file's own; else ``tokenizer.json``, ``tokenizer.bin`` or a ``tok*.bin``
    beside it."""
    path = Path(checkpoint)
    if path.suffix == ".gguf":
        return load_tokenizer(path)
    folder = path if path.is_dir() else path.parent
    candidates = [folder / "tokenizer.json", folder / "tokenizer.bin"]
    candidates += sorted(folder.glob("tok[0-9]*.bin"))
    if path.suffix == ".bin":
        candidates = candidates[1:]
    for candidate in candidates:
        if candidate.is_file():
            return load_tokenizer(candidate)
    raise FileNotFoundError(f"{folder}: no tokenizer beside the checkpoint; name one with --tokenizer")


def stream_text(tokenizer: Tokenizer, prompt: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
    """The text of ``prompt`` and of each id that follows, piece by piece.

    The pieces joined are ``decode`` of all ids: a piece that ends inside a character waits for the next id.
    """
    window = list(prompt)
    shown = tokenizer.decode(window)
    yield shown
    for token in ids:
        window.append(token)
        text = tokenizer.decode(window)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
            if len(window) > 64:  # keep a short context, so that the cost a token stays constant
                window = window[-16:]
                shown = tokenizer.decode(window)
    rest = tokenizer.decode(window)[len(shown) :]
    if rest:
        yield rest
