"""Names: which tensors take part, under which names and dtypes, and whether a payload fits a target.

The order is always select, rename, cast. Patterns are globs on names before renaming, and names are seen without the
components that wrappers add (:func:`canonical`). Trainer and worker run one function, :func:`match`, over the same
facts: the trainer with the :class:`Needs` that came with the worker's hello, the worker with its own target's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple, Union

import msgspec

from weightwire.calls import check_runs
from weightwire.errors import PreflightError, WireError
from weightwire.weights.dtypes import DTYPES, code_of
from weightwire.weights.scaled import SCALABLE

if TYPE_CHECKING:
    import torch

    from weightwire.weights.layout import Layout

__all__ = [
    "Cast",
    "Difference",
    "Match",
    "NameMap",
    "Needs",
    "Rename",
    "Select",
    "canonical",
    "canonical_all",
    "decode_needs",
    "encode_needs",
    "match",
    "name_fault",
    "preflight",
]

Select = Union[str, Sequence[str], AbstractSet[str], Callable[[str], bool], None]
"""Globs (case matters), of which those with a leading ``!`` exclude; or a predicate; or all."""
Rename = Union[Mapping[str, str], Callable[[str], str], None]
"""Exact names, or prefixes where the key ends with ``.`` (``{"actor.": ""}``) or is empty (``{"": "actor."}``); or a
function."""
Cast = Union[str, "torch.dtype", Mapping[str, Union[str, "torch.dtype"]], None]
"""One dtype for all that is floating; or globs with the dtype of what they name; ``"target"``: what the target has. The
trainer can ask for ``"float8_e4m3fn*scale"`` (or another float8): see :mod:`weightwire.weights.scaled`."""

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components that torch.compile, FSDP and activation checkpointing put into names; no model of a user's means them."""

SHOWN = 20
"""How many names of a kind a message lists."""


def canonical(name: str) -> str:
    """The name without the components of wrappers, wherever they stand."""
    if "_mod" not in name and "_wrapped_module" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def canonical_all(names: Sequence[str]) -> list[str]:
    """Each name in its canonical form; all as they are where that would make two of them one."""
    return _if_injective(canonical, names) or list(names)


def _without_module(name: str) -> str:
    """The name, or pattern, without what DDP and DataParallel add; users have it, too: tried where names differ."""
    sign, name = ("!", name[1:]) if name.startswith("!") else ("", name)
    return sign + (".".join(part for part in name.split(".") if part != "module") or name)


def _if_injective(change: Callable[[str], str], names: Sequence[str]) -> list[str] | None:
    changed = [change(name) for name in names]
    return changed if len(set(changed)) == len(set(names)) and all(changed) else None


# -- select, rename, cast --------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class NameMap:
    """Select, rename and cast, checked once and then applied to any state.

    Raises :class:`~weightwire.PreflightError` where an option cannot be understood.
    """

    def __init__(self, select: Select = None, rename: Rename = None, cast: Cast = None) -> None:
        self.select = _read_select(select)
        self.rename = _read_rename(rename)
        self.cast = _read_cast(cast)
        self._looked = False

    @property
    def plain(self) -> tuple[tuple[str, ...] | None, dict[str, str] | None, str | dict[str, str] | None] | None:
        """The three options as plain data, or ``None`` where one of them is a function."""
        if callable(self.select) or callable(self.rename):
            return None
        return self.select, self.rename, self.cast

    def apply(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """The position and new name of each name that is selected.

        Raises :class:`~weightwire.PreflightError` where nothing is selected of something, or two names become one.
        """
        known = canonical_all(names)
        taken = [position for position, name in enumerate(known) if self.selects(name)]
        if names and not taken:
            raise PreflightError(
                f"select={_shown_option(self.select)} selects none of {len(names)} names"
                + _close([] if callable(self.select) else self.select or (), known)
            )
        renamed: dict[str, int] = {}
        for position in taken:
            new = self.renamed(known[position])
            other = renamed.setdefault(new, position)
            if other != position:
                how = "occur twice" if names[other] == names[position] else "would both become one"
                raise PreflightError(f"{names[other]!r} and {names[position]!r} {how}: {new!r}")
        return [(position, new) for new, position in renamed.items()]

    def check_use(self, names: Sequence[str]) -> None:
        """Raise :class:`~weightwire.PreflightError` where a table of renames or casts names nothing of all names; of
        those that name something, log once what else is in them that does not."""
        known = canonical_all(names)
        renames = self.rename if isinstance(self.rename, dict) else {}
        if renames and not any(_rename_of(renames, name) is not None for name in known) and "module." not in renames:
            raise PreflightError(f"rename={renames} renames none of {len(known)} names{_close(renames, known)}")
        casts = self.cast if isinstance(self.cast, dict) else {}
        if casts and not any(fnmatchcase(name, pattern) for name in known for pattern in casts):
            raise PreflightError(f"cast={casts} casts none of {len(known)} names{_close(casts, known)}")
        if not self._looked:
            self._looked = True
            self._tell_of_idle(known, renames, casts)

    def _tell_of_idle(self, names: Sequence[str], renames: Mapping[str, str], casts: Mapping[str, str]) -> None:
        """Patterns that match nothing beside others that do: misspelt, or meant for another policy."""
        select = () if callable(self.select) else self.select or ()
        idle = {
            "select": [p for p in select if not any(fnmatchcase(name, p.removeprefix("!")) for name in names)],
            "rename": [key for key in renames if not any(_rename_of({key: ""}, name) is not None for name in names)],
            "cast": [pattern for pattern in casts if not any(fnmatchcase(name, pattern) for name in names)],
        }
        for option, patterns in idle.items():
            if patterns and patterns != ["module."]:
                logger.warning(
                    "%s: %s of it matches none of %d names%s",
                    option,
                    ", ".join(map(repr, patterns)),
                    len(names),
                    _close([pattern.removeprefix("!") for pattern in patterns], names),
                )

    def selects(self, name: str) -> bool:
        """Whether a canonical name takes part."""
        if self.select is None:
            return True
        if callable(self.select):
            return bool(self.select(name))
        excluded = [pattern[1:] for pattern in self.select if pattern.startswith("!")]
        included = [pattern for pattern in self.select if not pattern.startswith("!")]
        chosen = any(fnmatchcase(name, p) for p in included) if included or not excluded else True
        return chosen and not any(fnmatchcase(name, p) for p in excluded)

    def renamed(self, name: str) -> str:
        """The new name of a canonical name."""
        if self.rename is None:
            return name
        if callable(self.rename):
            new = self.rename(name)
            if not isinstance(new, str):
                raise PreflightError(f"rename returned {new!r} for {name!r}: a name is a str")
            new = canonical(new)
        else:
            new = _rename_by_table(self.rename, name)
        if not new or "\0" in new:
            raise PreflightError(f"rename makes {new!r} of {name!r}: a name is not empty and holds no NUL")
        return new

    def dtype(self, name: str, dtype: str, target: str = "") -> str:
        """The name of the dtype after the cast, of a tensor that had ``name`` before renaming and has ``dtype`` now.

        ``target`` is the dtype that ``"target"`` stands for, where there is one. Raises
        :class:`~weightwire.PreflightError` for casts that lose more than digits (complex to real, floats to
        integers) or that torch lacks.
        """
        wanted = self._cast_of(canonical(name), dtype).removesuffix(SCALE)
        if wanted == "target":
            return target if target and _kind(target) >= _kind(dtype) >= 0 else dtype
        if wanted in ("", dtype):
            return dtype
        if _kind(dtype) < 0:
            raise PreflightError(f"cast: {name!r} is {dtype}, which torch cannot convert")
        if _kind(dtype) == _COMPLEX != _kind(wanted):
            raise PreflightError(f"cast: {name!r} is {dtype}; as {wanted} it would lose its imaginary part")
        if _kind(dtype) == _FLOATING > _kind(wanted):
            raise PreflightError(
                f"cast: {name!r} is {dtype}; as {wanted} it would lose its fractions: quantise it yourself, or cast it "
                f"with a scale, to 'float8_e4m3fn{SCALE}'"
            )
        return wanted

    def scaled(self, name: str, dtype: str) -> str:
        """The float8 to which a tensor is cast with a scale; empty where it is not. Only floating tensors are."""
        wanted = self._cast_of(canonical(name), dtype)
        return wanted.removesuffix(SCALE) if wanted.endswith(SCALE) and _kind(dtype) == _FLOATING else ""

    @property
    def scales(self) -> bool:
        """Whether a cast asks for scales."""
        return any(cast.endswith(SCALE) for cast in self._casts)

    @property
    def follows_target(self) -> bool:
        """Whether a cast takes what the target has."""
        return "target" in self._casts

    @property
    def _casts(self) -> Iterable[str]:
        return self.cast.values() if isinstance(self.cast, dict) else (self.cast or "",)

    def excuses(self, name: str, payload_names: Sequence[str] = (), *, bare: bool = False) -> bool:
        """Whether a target's name may be missing because it was not selected: nothing that would be renamed to it is.

        With ``bare``, names have been matched without ``module``: it must then be unselected however it is written.
        """
        if self.select is None:
            return False
        forms, maps = [canonical(name)], [self]
        if bare:
            if callable(self.select):
                return False
            forms.append(_without_module(name))
            maps.append(NameMap(list(map(_without_module, self.select)), self.rename))
        pairs = [(m, origin) for m in maps for form in forms for origin in m._origins(form, payload_names)]
        return bool(pairs) and not any(m.selects(origin) for m, origin in pairs)

    def _cast_of(self, name: str, dtype: str) -> str:
        if self.cast is None:
            return ""
        if isinstance(self.cast, str):
            return self.cast if self.cast == "target" or _kind(dtype) == _FLOATING else ""
        return next((wanted for pattern, wanted in self.cast.items() if fnmatchcase(name, pattern)), "")

    def _origins(self, name: str, payload_names: Iterable[str]) -> set[str]:
        """Names that renaming would turn into ``name``."""
        if self.rename is None:
            return {name}
        if callable(self.rename):
            return {n for n in (name, *payload_names) if self._renamed_or_none(n) == name}
        back = {k + name[len(v) :] if _is_prefix(k) else k for k, v in self.rename.items() if name.startswith(v)}
        return {n for n in (name, *back) if self._renamed_or_none(n) == name}

    def _renamed_or_none(self, name: str) -> str | None:
        try:
            return self.renamed(name)
        except Exception:  # the function was written for selected names only
            return None


_INTEGER, _FLOATING, _COMPLEX = 1, 2, 3
SCALE = "*scale"


def _kind(dtype: str) -> int:
    """Kinds in the order in which torch converts silently; -1: torch does not convert it at all."""
    if dtype == "bool":
        return 0
    if dtype.startswith("complex"):
        return _COMPLEX
    if dtype.startswith(("float", "bfloat")):
        return -1 if dtype.endswith("_x2") else _FLOATING
    return _INTEGER if dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64") else -1


def _read_select(select: Select) -> tuple[str, ...] | Callable[[str], bool] | None:
    if select is None or callable(select):
        check_runs(select, "select")  # what it returns is true
        return select
    if not isinstance(select, Iterable):
        raise PreflightError(f"select={select!r}: globs, or a function of a name, are wanted")
    patterns = (select,) if isinstance(select, str) else tuple(select)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise PreflightError(f"select={select!r}: patterns are str")
    return tuple("!" + canonical(p[1:]) if p.startswith("!") else canonical(p) for p in patterns)


def _read_rename(rename: Rename) -> dict[str, str] | Callable[[str], str] | None:
    if rename is None or callable(rename):
        return rename
    try:
        return {canonical(old): canonical(new) for old, new in rename.items()}
    except (AttributeError, TypeError) as exc:
        raise PreflightError(f"rename={rename!r}: a mapping of str to str, or a function, is wanted") from exc


def _read_cast(cast: Cast) -> str | dict[str, str] | None:
    if cast is None:
        return None
    if isinstance(cast, Mapping):
        if not all(isinstance(pattern, str) for pattern in cast):
            raise PreflightError(f"cast={cast!r}: patterns are str")
        return {canonical(pattern): _read_dtype(dtype) for pattern, dtype in cast.items()}
    return _read_dtype(cast)


def _read_dtype(dtype: object) -> str:
    name = dtype if isinstance(dtype, str) else str(dtype)
    name = name.removeprefix("torch.")
    if name.endswith(SCALE):
        if name.removesuffix(SCALE) not in SCALABLE:
            raise PreflightError(f"cast: {dtype!r}: a scale goes with one of {_listed(SCALABLE)}")
        return name
    if name == "target" or (name in DTYPES and _kind(name) >= 0):
        return name
    close = get_close_matches(name, [n for n in DTYPES if _kind(n) >= 0], n=3)
    raise PreflightError(
        f"cast: {dtype!r} is no dtype to convert to" + (f"; close ones: {_listed(close)}" if close else "")
    )


def _is_prefix(key: str) -> bool:
    return not key or key.endswith(".")


def _rename_by_table(table: Mapping[str, str], name: str) -> str:
    key = _rename_of(table, name)
    return name if key is None else table[key] + (name[len(key) :] if _is_prefix(key) else "")


def _rename_of(table: Mapping[str, str], name: str) -> str | None:
    """The key that a name is renamed by."""
    if name in table and not _is_prefix(name):
        return name
    return max((key for key in table if _is_prefix(key) and name.startswith(key)), key=len, default=None)


def _close(patterns: Iterable[str], names: Sequence[str]) -> str:
    found = [n for p in patterns for n in get_close_matches(p.lstrip("!"), names[:1000], n=3, cutoff=0.5)]
    return f"; close ones: {_listed(dict.fromkeys(found))}" if found else f", which are {_listed(names)}"


def name_fault(name: str) -> str:
    """Why no payload could have a tensor of this name; empty where one could."""
    from weightwire.wire import MAX_NAME

    if name.isprintable() and len(name) * 4 <= MAX_NAME:
        return ""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "a lone surrogate in its name, which is no text"
    if any(letter < " " or "\x7f" <= letter <= "\x9f" for letter in name):
        return "a control character in its name"
    return f"a name of {size} bytes, which is longer than {MAX_NAME}" if size > MAX_NAME else ""


def _shown_option(option: object) -> str:
    return getattr(option, "__qualname__", None) or repr(list(option) if isinstance(option, tuple) else option)


# -- what a target takes, and what does not fit ----------------------------------------------------------------------


class Needs(NamedTuple):
    """What a target takes: canonical names, dtypes and shapes of its tensors, and the map that payloads go through."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    map: NameMap


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Why a payload does not fit a target. False where it fits.

    ``missing`` names are the target's, ``unexpected`` ones the payload's after renaming; ``shapes`` and ``dtypes`` hold
    ``(name, payload's, target's)``.
    """

    common: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    dtypes: tuple[tuple[str, str, str], ...] = ()
    hint: str = ""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)

    def message(self) -> str:
        """All differences, at most some twenty of a kind by name, and what may be done."""
        lines = [
            f"the payload does not fit the target ({self.common or 'no'} name{'s' * (self.common != 1)} in common)"
        ]
        if self.missing:
            lines.append(f"  {len(self.missing)} missing from the payload: {_listed(self.missing)}")
        if self.unexpected:
            lines.append(f"  {len(self.unexpected)} unexpected in the payload: {_listed(self.unexpected)}")
        lines += _pairs_listed("shape", self.shapes)
        lines += _pairs_listed("dtype", self.dtypes)
        return "\n".join([*lines, f"  hint: {self.hint}"] if self.hint else lines)


class Match(NamedTuple):
    """Which entry of a layout goes into which tensor of a target; only to be used where ``difference`` is false."""

    pairs: list[tuple[int, int]]
    difference: Difference


def preflight(layout: Layout, needs: Needs, *, subset: bool = False) -> Difference:
    """What does not fit; a subset may leave names out."""
    return match(layout, needs, subset=subset).difference


def match(layout: Layout, needs: Needs, *, subset: bool = False) -> Match:
    """Pair a payload's entries with a target's tensors. Nothing broadcasts and nothing is cast that was not asked for.

    Raises :class:`~weightwire.PreflightError` where select or rename themselves cannot work on this payload.
    """
    before = list(layout.names)
    if not subset:
        needs.map.check_use(before)
    selected = needs.map.apply(before)
    new = [name for _, name in selected]
    theirs, ours, bare = _best_fit(new, needs.names)
    place = {name: position for position, name in enumerate(ours)}
    pairs = [(entry, place[name]) for (entry, _), name in zip(selected, theirs) if name in place]
    unexpected = tuple(name for name, fitted in zip(new, theirs) if fitted not in place)
    missing: tuple[str, ...] = ()
    if not subset and len(pairs) < len(ours):
        taken = {leaf for _, leaf in pairs}
        missing = tuple(
            name
            for leaf, name in enumerate(needs.names)
            if leaf not in taken and not needs.map.excuses(name, before, bare=bare)
        )
    shapes, dtypes = _misfits(layout, needs, pairs)
    hint = _hint(missing, unexpected, shapes, dtypes)
    difference = Difference(
        common=len(pairs), missing=missing, unexpected=unexpected, shapes=shapes, dtypes=dtypes, hint=hint
    )
    return Match(pairs, difference)


def _best_fit(theirs: Sequence[str], ours: Sequence[str]) -> tuple[Sequence[str], Sequence[str], bool]:
    """The names as they are, or both without ``module`` where more of them meet then."""
    common = len(set(theirs) & set(ours))
    if common == len(theirs) or common == len(ours):
        return theirs, ours, False
    bare_theirs, bare_ours = _if_injective(_without_module, theirs), _if_injective(_without_module, ours)
    if bare_theirs is None or bare_ours is None or len(set(bare_theirs) & set(bare_ours)) <= common:
        return theirs, ours, False
    return bare_theirs, bare_ours, True


def _misfits(
    layout: Layout, needs: Needs, pairs: Iterable[tuple[int, int]]
) -> tuple[tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...], tuple[tuple[str, str, str], ...]]:
    shapes, dtypes = [], []
    for position, leaf in pairs:
        entry, name = layout.entries[position], needs.names[leaf]
        if entry.shape != needs.shapes[leaf]:
            shapes.append((name, entry.shape, needs.shapes[leaf]))
        want = needs.dtypes[leaf]
        if entry.dtype != want or needs.map.cast is not None:
            got = needs.map.dtype(entry.name, entry.dtype, want)
            if got != want:
                dtypes.append((name, got, want))
    return tuple(shapes), tuple(dtypes)


# -- hints -----------------------------------------------------------------------------------------------------------


def _hint(
    missing: Sequence[str],
    unexpected: Sequence[str],
    shapes: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
    dtypes: Sequence[tuple[str, str, str]],
) -> str:
    hints = []
    if unexpected:
        hints.append(_name_hint(missing, unexpected))
    if shapes and all(got == want[::-1] for _, got, want in shapes):
        hints.append("the shapes are transposed: one side keeps its weights as (in, out), the other as (out, in)")
    elif shapes and all(_count(got) == _count(want) for _, got, want in shapes):
        hints.append("the numbers of elements agree, the shapes do not: nothing is reshaped on the way")
    if dtypes and all(_kind(want) >= _kind(got) >= 0 for _, got, want in dtypes):
        hints.append('nothing is cast unless asked for: cast="target" on the receiver')
    elif dtypes:
        hints.append(f'nothing is cast unless asked for: cast={{"{dtypes[0][0]}": "{dtypes[0][2]}"}}')
    return "; ".join(filter(None, hints))


def _name_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """The prefix by which the two sides differ, and the option that bridges it."""
    if not missing:
        return f'the target has no such names: select=["!{unexpected[0]}"] and the like leave them out'
    old, new, count = _prefixes(missing, unexpected)
    if not count:
        close = get_close_matches(unexpected[0], missing[:1000], n=1)
        return f"{unexpected[0]!r} is close to {close[0]!r}" if close else ""
    more = f"the payload's names begin with {old!r}" if old else "the payload's names lack a prefix"
    there = f"the target's with {new!r}" if new else "the target's do not"
    select = f'select="{old}*", ' if old and count < len(unexpected) else ""
    return f'{more}, {there}: {select}rename={{"{old}": "{new}"}} on the receiver'


def _prefixes(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[str, str, int]:
    """``(old, new, count)``: renaming ``old`` to ``new`` turns ``count`` unexpected names into missing ones."""
    longer = Counter((head, "") for head in _heads(unexpected, set(missing)))
    shorter = Counter(("", head) for head in _heads(missing, set(unexpected)))
    old, new = _common_prefix(unexpected), _common_prefix(missing)
    rest = {name[len(new) :] for name in missing}
    other = Counter({(old, new): sum(name[len(old) :] in rest for name in unexpected)}) if old and new else Counter()
    (best, count), *_ = [*(longer + shorter + other).most_common(1), (("", ""), 0)]
    return *best, count


def _heads(names: Iterable[str], tails: set[str]) -> Iterable[str]:
    for name in names:
        for position, letter in enumerate(name):
            if letter == "." and name[position + 1 :] in tails:
                yield name[: position + 1]


def _common_prefix(names: Sequence[str]) -> str:
    first, last = min(names).split("."), max(names).split(".")
    same = 0
    while same < min(len(first), len(last)) - 1 and first[same] == last[same]:
        same += 1
    return "".join(part + "." for part in first[:same])


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name if len(name) <= 200 else name[:197] + "..." for name in names[:SHOWN]) + more


def _pairs_listed(kind: str, triples: Sequence[tuple[str, object, object]]) -> list[str]:
    lines = [f"  {kind} of {name}: {got} in the payload, {want} in the target" for name, got, want in triples[:SHOWN]]
    return [*lines, f"  and {len(triples) - SHOWN} more of another {kind}"] if len(triples) > SHOWN else lines


# -- over the wire ---------------------------------------------------------------------------------------------------


class _WireNeeds(msgspec.Struct, frozen=True, array_like=True):
    names: tuple[str, ...]
    dtypes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    select: tuple[str, ...] | None
    rename: dict[str, str] | None
    cast: str | dict[str, str] | None


_decoder = msgspec.msgpack.Decoder(_WireNeeds)
_DTYPE_NAMES = tuple(DTYPES)


def encode_needs(needs: Needs) -> bytes:
    """Needs as bytes; empty where they hold functions and so can only be checked in the worker."""
    plain = needs.map.plain
    if plain is None:
        return b""
    wire = _WireNeeds(needs.names, tuple(map(code_of, needs.dtypes)), needs.shapes, *plain)
    return msgspec.msgpack.encode(wire)


def decode_needs(data: bytes) -> Needs | None:
    """The inverse; ``None`` for empty. Raises :class:`~weightwire.WireError` for anything that is no needs."""
    if not data:
        return None
    from weightwire.wire import MAX_DIMS, MAX_HEADER, MAX_NAME, MAX_RANK, MAX_TENSORS

    if len(data) > MAX_HEADER:
        raise WireError(f"needs of {len(data)} bytes: at most {MAX_HEADER} are read")
    try:
        wire = _decoder.decode(data)
        count = len(wire.names)
        if not count == len(wire.dtypes) == len(wire.shapes) == len(set(wire.names)):
            raise ValueError("names, dtypes and shapes do not go together")
        if (
            count > MAX_TENSORS
            or sum(map(len, wire.shapes)) > MAX_DIMS
            or max(map(len, wire.shapes), default=0) > MAX_RANK
        ):
            raise ValueError("too many tensors or dimensions")
        if any(len(name) > MAX_NAME for name in wire.names):
            raise ValueError("a name that is too long")
        if any(size < 0 for shape in wire.shapes for size in shape) or min(wire.dtypes, default=0) < 0:
            raise ValueError("a negative number")
        dtypes = tuple(_DTYPE_NAMES[code] for code in wire.dtypes)
        return Needs(wire.names, dtypes, wire.shapes, NameMap(wire.select, wire.rename, wire.cast))
    except (ValueError, LookupError, RecursionError, msgspec.MsgspecError) as exc:
        raise WireError(f"malformed needs: {exc}") from exc
