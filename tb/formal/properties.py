"""What is claimed of what.

Each :class:`Claim` is one proof or one planted fault. All proofs are unbounded in time and hold for every input,
stall pattern and reset, at the widths that the table names: of a unit its configuration ``formal`` where the catalog
has one, else every configuration whose name begins with ``small``; and variants of the first of these, one for each
other value of a choice or flag (form of the algorithm, serial, streaming, ...). Not every combination is tried.

Nothing is abstracted: memories, tables and multipliers are in the model, at these small sizes. Senders may do what they
like, valid retracted included. Registers start with anything, memories with their initial contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any

import hw.arithmetic
import hw.pipeline
from golden.config import UnitConfig
from hw.catalog import UNITS, Entry
from tb.formal.arithmetic import BitLength, RoundShift, Saturate, Sums, Trees
from tb.formal.engine import ENGINE, STRUCTURE, Outcome, no_path, prove
from tb.formal.faults import mutant
from tb.formal.monitors import FREE_START, Count, Delay, Monitor, Order, Quotient, Root, Rules

#: Property -> what it says.
PROPERTIES = {
    "skid_order": "the skid buffer never drops, duplicates, changes or reorders a word, and holds at most two",
    "skid_paths": "the skid buffer has no combinational path between its sides",
    "stream_rules": "valid is not retracted, payload is stable while stalled, and reset empties the output",
    "stream_paths": "no output payload or valid depends combinationally on o.ready",
    "stream_order": "units that store no row deliver each accepted beat once, in order, and nothing else",
    "trees": "max, min and or trees of 1 to 9 lanes equal the sequential reference",
    "sums": "the adder tree of 1 to 9 lanes equals the running sum; magnitude is the absolute value",
    "round_shift": "shifts by a run-time or constant amount round half up",
    "saturate": "saturation gives the nearest value of the target word",
    "bit_length": "the leading-bit counter equals its definition",
    "divider": "quotient and remainder are those of the operands",
    "square_root": "root is the floor of the square root",
}


@dataclass(frozen=True)
class Claim:
    """``build`` makes what ``engine`` gets: a design with assertions, or for the structural check a component whose
    ``forbidden`` pairs of ports must not be joined. ``fault`` names what was planted; such a claim must fail."""

    name: str
    unit: str
    configuration: str
    build: Callable[[], Any]
    fault: str = ""
    engine: str = ENGINE
    prepare: tuple[str, ...] = ()
    forbidden: tuple[tuple[str, str], ...] = field(default=())

    @property
    def folder(self) -> str:
        words = [self.name, self.unit, self.configuration, self.fault]
        return "-".join("_".join(word.replace(",", "").replace(".", "").split()) for word in words if word)

    def check(self, timeout: int = 600) -> Outcome:
        if self.engine == STRUCTURE:
            return no_path(self.folder, self.build(), self.forbidden, timeout)
        return prove(self.folder, self.build(), self.prepare, timeout)


def configurations(entry: Entry) -> dict[str, UnitConfig]:
    """The configurations on which a unit is proven: those of the catalog, then their variants."""
    if "formal" in entry.configurations:
        found = {"formal": entry.configurations["formal"]}
    else:
        found = {name: config for name, config in entry.configurations.items() if name.startswith("small")}
    name, config = next(iter(found.items()))
    items = fields(config)  # type: ignore[arg-type]
    alternatives = {item.name: others(config, item) for item in items}
    sizes = [{item.name: 2 * config.lanes} for item in items if "low" in item.metadata]  # type: ignore[attr-defined]
    tried = {switches(config) for config in found.values()}
    for key, values in alternatives.items():
        for value in values:
            # Where one change alone is not legal, a second one may be what it needs: another switch, or a size that
            # the lanes divide.
            pairs = [{other: v} for other, vs in alternatives.items() if other != key for v in vs]
            for more in ({}, *pairs, *sizes):
                changes = {key: value, **more}
                try:
                    variant = config.replace(**changes)
                except ValueError:
                    continue
                if switches(variant) not in tried:
                    tried.add(switches(variant))
                    text = " ".join(f"{k}={str(v).lower()}" for k, v in changes.items())
                    found[f"{name} {text}"] = variant
                break
    return found


def others(config: UnitConfig, item: Field[Any]) -> list[Any]:
    """The values of a choice or flag that a configuration does not have; none for a number."""
    options = item.metadata.get("options", (False, True) if "flag" in item.metadata else ())
    return [value for value in options if value != getattr(config, item.name)]


def switches(config: UnitConfig) -> tuple[Any, ...]:
    """All choices and flags of a configuration."""
    return tuple(
        getattr(config, item.name)
        for item in fields(config)  # type: ignore[arg-type]
        if "options" in item.metadata or "flag" in item.metadata
    )


def described(entry: Entry, config: UnitConfig) -> Any:
    """A component that is only asked for its signature and latency."""
    unit = entry.component(config)
    unit._MustUse__silence = True  # type: ignore[attr-defined]
    return unit


def order_monitor(entry: Entry, config: UnitConfig) -> Callable[..., Monitor] | None:
    """The monitor of ``stream_order`` that suits a unit: a delay line for a stallable pipeline, a count for one that
    works on a beat at a time, none for a unit that stores rows."""
    unit = described(entry, config)
    named = all({"keep", "last"} <= {name for name, _ in port.payload.shape()} for port in (unit.i, unit.o))
    if unit.passes != 1 or not named:
        return None
    if unit.initiation_interval > unit.latency:
        return partial(Count, capacity=1)
    one, two = unit.row_cycles(1), unit.row_cycles(1 + config.lanes)  # type: ignore[attr-defined]
    return partial(Delay, depth=unit.latency) if (one, two) == (1 + unit.latency, 2 + unit.latency) else None


def watched(monitor: Callable[..., Monitor], make: Callable[[], Any], **arguments: Any) -> Callable[[], Monitor]:
    """Builds the monitor around a component that ``make`` makes."""
    return lambda: monitor(make(), **arguments)


FREE = (FREE_START,)
READY_PATHS = (("o__ready", "o__valid"), ("o__ready", "o__payload"))
SKID_PATHS = (
    ("o__ready", "i__ready"),
    ("i__valid", "i__ready"),
    *((source, sink) for source in ("i__valid", "i__payload") for sink in ("o__valid", "o__payload")),
    *READY_PATHS,
)

#: Components with streams that units are made of: name -> (size, maker).
PARTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "SkidBuffer": ("8 bit", partial(hw.pipeline.SkidBuffer, 8)),
    "Divider": ("4 by 3 bit", partial(hw.arithmetic.Divider, 4, 3)),
    "SquareRoot": ("6 bit", partial(hw.arithmetic.SquareRoot, 6)),
}

#: Combinational functions: property -> (functions, what they are tried on, design).
FUNCTIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "sums": ("adder_tree, magnitude", "1 to 9 lanes of 3 bit", Sums),
    "round_shift": ("round_shift, round_shift_by", "words of 1, 3 and 4 bit", RoundShift),
    "saturate": ("saturate", "1 to 6 bit to 1 to 6 bit", Saturate),
    "bit_length": ("bit_length", "words of 1 to 9 bit", BitLength),
}
TREE_SIZE = "1 to 9 lanes of 4 bit"


def claims() -> Iterator[Claim]:
    """Everything that must be proven."""
    size, skid = PARTS["SkidBuffer"]
    yield Claim("skid_order", "SkidBuffer", size, watched(Order, skid, capacity=2), prepare=FREE)
    yield Claim("skid_paths", "SkidBuffer", size, skid, engine=STRUCTURE, forbidden=SKID_PATHS)
    for name, (size, make) in PARTS.items():
        yield Claim("stream_rules", name, size, watched(Rules, make), prepare=FREE)
        yield Claim("stream_paths", name, size, make, engine=STRUCTURE, forbidden=READY_PATHS)
        if name != "SkidBuffer":
            yield Claim("stream_order", name, size, watched(Count, make, capacity=1), prepare=FREE)
    for entry in UNITS.values():
        for name, config in configurations(entry).items():
            make = partial(entry.component, config)
            yield Claim("stream_rules", entry.name, name, watched(Rules, make), prepare=FREE)
            yield Claim("stream_paths", entry.name, name, make, engine=STRUCTURE, forbidden=READY_PATHS)
            if monitor := order_monitor(entry, config):
                yield Claim("stream_order", entry.name, name, watched(monitor, make), prepare=FREE)
    for kind in ("max", "min", "or"):
        yield Claim("trees", f"{kind}_tree", TREE_SIZE, partial(Trees, kind))
    for name, (functions, size, design) in FUNCTIONS.items():
        yield Claim(name, functions, size, design)
    for name, part, monitor in (("divider", "Divider", Quotient), ("square_root", "SquareRoot", Root)):
        size, make = PARTS[part]
        yield Claim(name, part, size, watched(monitor, make), prepare=FREE)


def faults() -> Iterator[Claim]:
    """Each claim with something wrong in it: every one of these must fail."""
    yield from skid_faults()
    yield from unit_faults()
    yield from pipeline_faults()
    yield from function_faults()


def skid_faults() -> Iterator[Claim]:
    size = PARTS["SkidBuffer"][0]

    def skid(old: str, new: str) -> Any:
        return mutant("hw.pipeline", {old: new}).SkidBuffer(8)

    for fault, old, new in (
        ("drops the word that comes while it stalls", "m.d.sync += [full.eq(1)]", "m.d.sync += [full.eq(0)]"),
        ("sends a word twice", "full.eq(0), valid.eq(i.valid | full)", "valid.eq(i.valid | full)"),
        ("sends the newer word first", "word.eq(Mux(full, spare,", "word.eq(Mux(full & ~i.valid, spare,"),
        ("spare word is overwritten", "with m.If(~full):", "with m.If(1):"),
        ("reset leaves it full", "full = Signal()", "full = Signal(reset_less=True)"),
        ("refuses a word that has a place", "i.ready.eq(~full)", "i.ready.eq(~full & ~valid)"),
    ):
        build = watched(Order, partial(skid, old, new), capacity=2)
        yield Claim("skid_order", "SkidBuffer", size, build, fault, prepare=FREE)
    for fault, new in (
        ("ready passes through", "i.ready.eq(~full | o.ready)"),
        ("ready waits for valid", "i.ready.eq(~full & i.valid)"),
    ):
        make = partial(skid, "i.ready.eq(~full)", new)
        yield Claim("skid_paths", "SkidBuffer", size, make, fault, engine=STRUCTURE, forbidden=SKID_PATHS)


def unit_faults() -> Iterator[Claim]:
    """Faults around every unit: they also show that no proof of a unit holds for want of traffic."""
    for entry in UNITS.values():
        for name, config in configurations(entry).items():
            make = partial(entry.component, config)
            for key, fault in WRAPPED.items():
                # One fault is enough to see traffic in a variant.
                if name not in entry.configurations and key != "eager":
                    continue
                build = watched(Rules, make, fault=key)
                yield Claim("stream_rules", entry.name, name, build, fault, prepare=FREE)
            if monitor := order_monitor(entry, config):
                build = watched(monitor, make, fault="eager")
                yield Claim("stream_order", entry.name, name, build, WRAPPED["eager"], prepare=FREE)


def pipeline_faults() -> Iterator[Claim]:
    """Faults in the shared pipeline, seen through the exponential."""
    small = UNITS["exp"].configurations["small"]
    latency = described(UNITS["exp"], small).latency

    def exp(pipeline: tuple[str, str] | None, unit: tuple[str, str] | None = None) -> Any:
        replaced = mutant("hw.pipeline", dict([pipeline] if pipeline else []))
        changed = mutant("hw.nonlinear.exp", dict([unit] if unit else []), Pipeline=replaced.Pipeline)
        return changed.Exp(small)

    def always(register: str) -> tuple[str, str]:
        condition, move = "with self.m.If(self.advance):", f"\n            self.m.d.sync += {register}"
        return condition + move, "with self.m.If(1):" + move

    valid = 'name=f"{prefix}_valid")'
    for fault, pipeline in (
        ("registers move while stalled", always("register")),
        ("valid moves while stalled", always("valid")),
        ("valid survives reset", (valid, valid.replace(")", ", reset_less=True)"))),
    ):
        build = watched(Rules, partial(exp, pipeline))
        yield Claim("stream_rules", "exp", "small", build, fault, prepare=FREE)
    skipped = ("self.valid = valid\n", "self.valid = valid if self.depth > 1 else self.valid\n")
    for fault, pipeline_change, unit in (
        ("a stage does not register valid", skipped, None),
        ("a carried field is left behind", None, ('pipe["last"])]', "i.payload.last)]")),
        ("a beat is accepted while stalled", None, ("i.ready.eq(advance)", "i.ready.eq(1)")),
    ):
        build = watched(Delay, partial(exp, pipeline_change, unit), depth=latency)
        yield Claim("stream_order", "exp", "small", build, fault, prepare=FREE)
    gated = partial(exp, None, ("o.valid.eq(pipe.valid)", "o.valid.eq(pipe.valid & o.ready)"))
    yield Claim(
        "stream_paths",
        "exp",
        "small",
        gated,
        "valid waits for ready",
        engine=STRUCTURE,
        forbidden=READY_PATHS,
    )


def function_faults() -> Iterator[Claim]:
    def changed(design: Callable[..., Any], old: str, new: str) -> Any:
        return design(functions=mutant("hw.arithmetic", {old: new}))

    odd = ("level[len(level) - len(level) % 2 :]", "level[:0]")
    for kind, fault, old, new in (
        ("max", "compares the wrong way", "Mux(b > a, b, a)", "Mux(b < a, b, a)"),
        ("max", "compares as unsigned", "Mux(b > a, b, a)", "Mux(b.as_unsigned() > a.as_unsigned(), b, a)"),
        ("max", "loses the odd lane", *odd),
        ("min", "takes the second of a pair", "Mux(b < a, b, a)", "b"),
        ("min", "compares as unsigned", "Mux(b < a, b, a)", "Mux(b.as_unsigned() < a.as_unsigned(), b, a)"),
        ("or", "bits cancel", "lambda a, b: a | b", "lambda a, b: a ^ b"),
    ):
        yield Claim("trees", f"{kind}_tree", TREE_SIZE, partial(changed, partial(Trees, kind), old, new), fault)
    clamp = "C(high, shape), Mux(x < low, C(low, shape), _as(x, shape)))"
    for name, fault, old, new in (
        ("sums", "drops the carry", "lambda a, b: a + b)", "lambda a, b: (a + b)[: len(a)].as_signed())"),
        ("sums", "magnitude of negative values less one", "Mux(x < 0, -x, x)", "Mux(x < 0, ~x, x)"),
        ("round_shift", "truncates", "total = rounded + moved[0]", "total = rounded + 0"),
        (
            "round_shift",
            "limit is ignored",
            "shift = Mux(shift > limit, limit, shift)[:bits]",
            "shift = shift[:bits]",
        ),
        ("round_shift", "sign is lost", "guarded = guarded.as_signed()", "pass"),
        (
            "round_shift",
            "constant shift rounds half down",
            "(1 << (shift - 1))) >>",
            "(1 << (shift - 1)) - 1) >>",
        ),
        ("saturate", "no lower bound", clamp, "C(high, shape), _as(x, shape))"),
        ("saturate", "bounds of the other sign", "bounds(bits, is_signed)", "bounds(bits, not is_signed)"),
        ("bit_length", "one for zero", "return Mux(some, index + 1, 0)", "return index + 1"),
        (
            "bit_length",
            "lowest half wins",
            "Mux(some_high, high, low), some_high",
            "Mux(some_low, low, high), some_high",
        ),
    ):
        functions, size, design = FUNCTIONS[name]
        yield Claim(name, functions, size, partial(changed, design, old, new), fault)
    bit = "Cat(fits, quotient[:-1])"
    trial = "partial - Cat(C(1, 2), root)"
    for name, part, monitor, fault, old, new in (
        ("divider", "Divider", Quotient, "quotient bits are inverted", bit, bit.replace("fits", "~fits")),
        ("square_root", "SquareRoot", Root, "subtracts too much", trial, trial.replace("C(1, 2)", "C(2, 2)")),
    ):
        size, make = PARTS[part]
        arguments = make.args  # type: ignore[attr-defined]
        build = watched(monitor, partial(changed_part, part, arguments, old, new))
        yield Claim(name, part, size, build, fault, prepare=FREE)


def changed_part(part: str, arguments: tuple[int, ...], old: str, new: str) -> Any:
    return getattr(mutant("hw.arithmetic", {old: new}), part)(*arguments)


#: Faults that a monitor plants around its unit.
WRAPPED = {
    "eager": "advances though o.ready is low",
    "no_reset": "ignores reset",
    "retract": "retracts valid",
}
