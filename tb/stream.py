"""Both ends of a unit under test: stall generators, and a session that drives, monitors and keeps score.

A session knows nothing of a simulator: each clock cycle the simulator's loop asks it what to drive and tells it what
it saw, so that cocotb and Amaranth's own simulator run the same bench.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: A stall pattern says, for each cycle, whether that side moves.
Pattern = Callable[[random.Random, int], bool]


def always(generator: random.Random, cycle: int) -> bool:
    return True


def often(generator: random.Random, cycle: int) -> bool:
    return generator.random() < 0.7


def seldom(generator: random.Random, cycle: int) -> bool:
    return generator.random() < 0.2


def every_other(generator: random.Random, cycle: int) -> bool:
    return cycle % 2 == 0


def bursts(generator: random.Random, cycle: int) -> bool:
    """Eight cycles on, then eight off, out of step with most row lengths."""
    return (cycle // 8) % 2 == 0


#: Name -> (pattern of the sender, pattern of the receiver).
STALLS: dict[str, tuple[Pattern, Pattern]] = {
    "none": (always, always),
    "slow sender": (seldom, always),
    "slow receiver": (always, seldom),
    "both random": (often, often),
    "alternating": (every_other, every_other),
    "bursts": (bursts, bursts),
    "burst receiver": (often, bursts),
}


class Mismatch(AssertionError):
    """The unit under test did something that the golden function or the stream rules forbid."""


@dataclass
class Beats:
    """Packed beats: payloads as integers, and for expected ones the bits that count and which beats end a row."""

    words: Sequence[int]
    masks: Sequence[int] | None = None
    lasts: Sequence[bool] | None = None


class Session:
    """Drives beats into a unit, collects and checks what comes out.

    Parameters
    ----------
    send, expect : Beats
    stalls : name of a pattern in STALLS, or "last beat": the receiver leaves every last beat waiting.
    seed : int
    explain : callable, optional
        (index of the beat, got, wanted) -> text for a mismatch.

    Checks: ``o.valid`` never drops and ``o.payload`` never changes while not ready; every beat equals the expected
    one in all bits that count; none is missing and none is too many. The sender keeps its own side of the rules.
    """

    def __init__(
        self,
        send: Beats,
        expect: Beats,
        stalls: str = "none",
        seed: int = 0,
        explain: Callable[[int, int, int], str] | None = None,
    ) -> None:
        self.send, self.expect, self.stalls, self.explain = send, expect, stalls, explain
        self.sender, self.receiver = STALLS.get(stalls, STALLS["none"])
        self.generator = random.Random(seed)
        self.cycle = 0
        self.sent = 0
        self.taken = 0
        self.first_accepted: int | None = None
        self.last_taken = 0
        self._offering = False
        self._held: int | None = None
        self._patience = 0

    @property
    def done(self) -> bool:
        return self.sent == len(self.send.words) and self.taken == len(self.expect.words)

    def drive(self) -> tuple[int, int, int]:
        """(i.valid, i.payload, o.ready) of this cycle. Payload is noise while nothing is offered."""
        if self.sent < len(self.send.words):
            self._offering = self._offering or self.sender(self.generator, self.cycle)
        word = self.send.words[self.sent] if self._offering else self.generator.getrandbits(16)
        ready = self.receiver(self.generator, self.cycle)
        if self.stalls == "last beat" and self._at_last():
            ready = self._patience >= 5
        return int(self._offering), word, int(ready)

    def observe(self, ready: int, valid: int, payload: int | None, o_ready: int) -> None:
        """What the unit showed before the clock edge of this cycle."""
        if self._held is not None and not valid:
            raise Mismatch(f"cycle {self.cycle}: valid dropped while the receiver was not ready")
        if valid:
            assert payload is not None
            if self._held is not None and payload != self._held:
                raise Mismatch(f"cycle {self.cycle}: payload changed while the receiver was not ready")
            self._held = None if o_ready else payload
            self._patience = 0 if o_ready else self._patience + 1
            if o_ready:
                self._score(payload)
        if self._offering and ready:
            if self.first_accepted is None:
                self.first_accepted = self.cycle
            self.sent += 1
            self._offering = False
        self.cycle += 1

    def _at_last(self) -> bool:
        lasts = self.expect.lasts
        return lasts is not None and self.taken < len(lasts) and bool(lasts[self.taken])

    def _score(self, payload: int) -> None:
        k = self.taken
        if k >= len(self.expect.words):
            raise Mismatch(f"cycle {self.cycle}: a beat more than the golden function gives")
        mask = self.expect.masks[k] if self.expect.masks else -1
        if (payload ^ self.expect.words[k]) & mask:
            told = self.explain(k, payload, self.expect.words[k]) if self.explain else ""
            raise Mismatch(f"cycle {self.cycle}: output beat {k} differs from the golden function {told}")
        self.taken += 1
        self.last_taken = self.cycle

    @property
    def row_cycles(self) -> int:
        """Cycles from the one of the first accepted beat to the one of the last beat taken, both included."""
        assert self.first_accepted is not None
        return self.last_taken - self.first_accepted + 1
