"""Endpoint text -> :class:`Endpoint`.

An endpoint is one line of text that names a backend, a place and options::

    backend[@distribution][://location][?key=value[&key=value...]]
    import:package.module[://location][?key=value[&key=value...]]

Location and values may be percent-encoded, and are where they hold ``? & # %``, blanks or anything beyond ASCII. The
same can be written as a mapping, for YAML and Hydra: ``{"backend": "ipc", "location": "policy", "slots": 3}``. Each
process resolves its backend from the canonical text, so values are kept as text until :func:`options_for` types them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import quote, unquote

from weightwire.errors import EndpointError

if TYPE_CHECKING:
    from weightwire.hookspecs import BackendInfo

__all__ = ["Endpoint", "Size", "check_located", "in_order", "options_for", "parse", "parse_size", "scoped"]

MAX_LENGTH = 4096
"""Characters of the canonical text: no honest endpoint is longer, and whoever logs one need not fear it."""

_IMPORT = "import:"
_RESERVED = ("backend", "distribution", "location")  # the mapping form uses these keys itself
_CORE_OPTIONS = ("allow_pickle",)  # understood by the core for every backend
_NAME = re.compile(r"\w[\w.-]*")
_ESCAPE_FAULT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SAFE = "/:@[]~,;+=!$'()*"
_EXAMPLES = "'ipc', 'ipc://policy?slots=3', 'import:package.module://policy'"


@dataclass(frozen=True)
class Endpoint:
    """A parsed endpoint. ``str()`` gives its canonical text, which :func:`parse` turns back into an equal endpoint.

    Attributes:
        backend: an open string: an entry point's name, or ``import:package.module``.
        distribution: which distribution's backend of that name, where two are installed.
        location: decoded; empty for a unique place that the backend makes up.
        options: decoded text, sorted by name. Numbers and booleans are turned into text.

    Raises:
        EndpointError: a part is malformed, holds control characters, or all together are too long.
    """

    backend: str
    distribution: str | None = None
    location: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name(self.backend, self.distribution)
        _check_printable("the location", self.location)
        texts: dict[str, str] = {}
        given: Mapping[Any, Any] = self.options  # a caller's, not yet what the annotation says
        for key, value in given.items():
            if not isinstance(key, str) or not _NAME.fullmatch(key) or key in _RESERVED:
                raise EndpointError(f"{key!r} cannot be an option's name")
            if value is not None:  # as YAML writes "the default"
                texts[key] = _as_text(f"option {key!r}", value)
                _check_printable(f"the value of option {key!r}", texts[key])
        object.__setattr__(self, "options", dict(sorted(texts.items())))
        if len(str(self)) > MAX_LENGTH:
            raise EndpointError(f"it is longer than {MAX_LENGTH} characters")

    @property
    def module(self) -> str | None:
        """The module's name of ``import:package.module``, else ``None``."""
        return self.backend[len(_IMPORT) :] if self.backend.startswith(_IMPORT) else None

    @property
    def allow_pickle(self) -> bool:
        """Whether the user lets a backend pickle (``allow_pickle=true``); an option that every endpoint has."""
        text = self.options.get("allow_pickle", "false").lower()
        if text not in ("true", "false", "1", "0"):
            raise EndpointError(f"endpoint {str(self)!r}: option 'allow_pickle' is {text!r}; write true or false")
        return text in ("true", "1")

    def __str__(self) -> str:
        text = self.backend + (f"@{self.distribution}" if self.distribution else "")
        if self.location:
            text += f"://{quote(self.location, safe=_SAFE)}"
        if self.options:
            text += "?" + "&".join(f"{key}={quote(value, safe=_SAFE)}" for key, value in self.options.items())
        return text

    def __hash__(self) -> int:
        return hash(str(self))


def parse(given: str | Mapping[str, Any] | Endpoint) -> Endpoint:
    """Understand an endpoint in any of its forms.

    Raises:
        EndpointError: quotes what was given, says what is wrong with it, and shows right ones.
    """
    if isinstance(given, Endpoint):
        return given
    try:
        if isinstance(given, str):
            return _from_text(given)
        if isinstance(given, Mapping):
            return _from_mapping(given)
        raise EndpointError(f"text or a mapping is needed, not {type(given).__name__}")
    except EndpointError as exc:
        raise EndpointError(f"endpoint {_shown(given)}: {exc}. Right ones: {_EXAMPLES}.") from None


def check_located(endpoint: Endpoint) -> None:
    """For the receivers of backends whose places have names: :class:`~weightwire.EndpointError` where there is none."""
    if not endpoint.location:
        raise EndpointError(
            f"endpoint {str(endpoint)!r}: a worker needs to know the place. Use a name on both sides, as in "
            f"'{endpoint.backend}://policy', or hand updater.endpoint on to the workers."
        )


def _from_text(text: str) -> Endpoint:
    if len(text) > MAX_LENGTH:
        raise EndpointError(f"it is longer than {MAX_LENGTH} characters")
    _check_printable("it", text)
    if text != text.strip():
        raise EndpointError("blanks around it are no part of an endpoint (inside a location, write %20)")
    head, asked, query = text.partition("?")
    name, _, location = head.partition("://")
    if name.startswith(_IMPORT):
        backend, distribution = name, None
    else:
        backend, at, rest = name.partition("@")
        distribution = rest if at else None
    if "&" in location:
        raise EndpointError("options come after '?', joined by '&' (inside a location, write %26)")
    options: dict[str, str] = {}
    for pair in query.split("&") if asked else ():
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise EndpointError(f"{pair!r} is no option; write key=value, joined by &")
        if key in options:
            raise EndpointError(f"option {key!r} is given twice")
        options[key] = _decode(value)
    return Endpoint(backend, distribution, _decode(location), options)


def _from_mapping(given: Mapping[str, Any]) -> Endpoint:
    rest = dict(given)
    if "backend" not in rest:
        raise EndpointError("the key 'backend' is missing")
    backend, distribution, location = (rest.pop(key, None) for key in _RESERVED)
    return Endpoint(backend, distribution, "" if location is None else _as_text("the location", location), rest)


def _check_name(backend: object, distribution: object) -> None:
    if not isinstance(backend, str) or not backend:
        raise EndpointError("the backend's name is missing")
    if backend.startswith(_IMPORT):
        if not all(part.isidentifier() for part in backend[len(_IMPORT) :].split(".")):
            raise EndpointError(f"{backend!r} does not name a module")
        if distribution is not None:
            raise EndpointError("a module that is named directly has no @distribution")
    elif not _NAME.fullmatch(backend):
        hint = "; a location comes after '://'" if ":" in backend or "/" in backend else ""
        raise EndpointError(f"{backend!r} cannot be a backend's name{hint}")
    if distribution is not None and not (isinstance(distribution, str) and _NAME.fullmatch(distribution)):
        raise EndpointError(f"{distribution!r} cannot be a distribution's name")


def _check_printable(what: str, text: object) -> None:
    # Control characters, NUL, lone surrogates and invisible marks have no business in a label that goes into logs.
    if not isinstance(text, str) or not text.isprintable():
        raise EndpointError(f"{what} holds a character that cannot be printed")


def _as_text(what: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise EndpointError(f"{what} is a {type(value).__name__}; text, a number, true or false is needed")


def _decode(text: str) -> str:
    if _ESCAPE_FAULT.search(text):
        raise EndpointError("a literal '%' is written %25")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise EndpointError("its percent-encoding is not UTF-8") from None


def _shown(given: object) -> str:
    text = repr(given[:200] if isinstance(given, str) else given)
    return text if len(text) <= 200 else text[:200] + "..."


# -- options -----------------------------------------------------------------------------------------------------------


class _InBytes:
    """Marks an option that counts bytes and may be written with a unit."""


Size = Annotated[int, _InBytes]
"""The type of an option that counts bytes: ``bucket: Size = 32 << 20`` takes ``bucket=64MiB``."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,18}) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """``"64MiB"`` -> 67108864. Units: B, KB, MB, GB (powers of 1000) and KiB, MiB, GiB (of 1024); none means bytes."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise EndpointError(f"{text!r} is no size; write a whole number of B, KB, MB, GB, KiB, MiB or GiB, as in 64MiB")
    return int(match[1]) * unit


def in_order(endpoint: str | Mapping[str, Any] | Endpoint, weights: object) -> str | Mapping[str, Any] | Endpoint:
    """The endpoint of two arguments, unless they were swapped: ``EndpointError``."""
    if isinstance(weights, (str, Endpoint)):
        raise EndpointError(
            f"the endpoint is a {type(endpoint).__name__} and the weights are {str(weights)!r:.200}: did you swap the "
            "arguments? The endpoint comes first"
        )
    return endpoint


def options_for(endpoint: Endpoint, info: BackendInfo) -> Any:
    """The endpoint's options as an instance of ``info.options``; ``None`` where the backend takes none.

    Raises:
        EndpointError: an unknown option (with what exists and what is close), a value of the wrong type or out of
            bounds (with what is expected), or a missing one.
    """
    import msgspec

    fields = {f.encode_name: f for f in msgspec.structs.fields(info.options)} if info.options is not None else {}
    values: dict[str, Any] = {}
    for key, text in endpoint.options.items():
        if key in fields:
            values[key] = _option(endpoint, key, text, fields[key].type)
        elif key not in _CORE_OPTIONS:
            raise EndpointError(_unknown_option(endpoint, key, sorted(fields)))
    if info.options is None:
        return None
    try:
        return msgspec.convert(values, info.options, strict=False)
    except msgspec.ValidationError as exc:  # a required option is missing, or options do not go together
        raise EndpointError(f"endpoint {str(endpoint)!r}: options of backend {endpoint.backend!r}: {exc}") from exc


def _option(endpoint: Endpoint, key: str, text: str, kind: Any) -> Any:
    import msgspec

    try:
        return msgspec.convert(parse_size(text) if _counts_bytes(kind) else text, kind, strict=False)
    except (msgspec.ValidationError, EndpointError) as exc:
        # All values start as text, so that "got `str`" would only mislead.
        why = str(exc).replace(", got `str`", "")
        if get_origin(kind) is Literal:
            why = f"it is one of {', '.join(map(repr, get_args(kind)))}"
        raise EndpointError(
            f"endpoint {str(endpoint)!r}: option {key!r} of backend {endpoint.backend!r} cannot be {text!r}: {why}"
        ) from exc


def _counts_bytes(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return _InBytes in kind.__metadata__ or _counts_bytes(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):  # ``Optional[Size]`` and ``Size | None``
        return any(_counts_bytes(part) for part in get_args(kind))
    return False


def _unknown_option(endpoint: Endpoint, key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, [*known, *_CORE_OPTIONS], n=1)
    has = f"takes the options {', '.join(known)}" if known else "takes no options"
    return (
        f"endpoint {str(endpoint)!r}: backend {endpoint.backend!r} has no option {key!r}; it {has}"
        f" (and every backend {', '.join(_CORE_OPTIONS)})." + (f" Did you mean {close[0]!r}?" if close else "")
    )


# -- named places ------------------------------------------------------------------------------------------------------


def scoped(location: str) -> str:
    """A label for a named location that keeps jobs apart: ``WEIGHTWIRE_JOB`` and the location, where that is set.

    Labels are printable ASCII, and different pairs of job and location never give the same one. They are no paths: they
    may hold ``/`` and ``..``, and may be long. An empty location is unique already and stays empty.
    """
    job = os.environ.get("WEIGHTWIRE_JOB", "")
    if not job.isprintable() or len(job) > 255:
        raise EndpointError(f"WEIGHTWIRE_JOB is {job[:200]!r}; it must be printable and at most 255 characters long")
    place = quote(location, safe="/:[]")  # "@" is not among them: it separates
    return f"{quote(job, safe='')}@{place}" if job and location else place
