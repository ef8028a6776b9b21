"""``weightwire new NAME``: the folder of a complete plugin, to be changed until it is your own.

What is written is the folder ``templates/plugin`` beside this module, with another name in place of ``mine``.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from weightwire.cli.text import complain
from weightwire.registry import available

__all__ = ["TEMPLATE", "files", "run"]

TEMPLATE = Path(__file__).parent / "templates" / "plugin"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 40
_RESERVED = ("vanilla", "ipc", "ray", "nccl", "testing", "cli", "core", "weightwire")


def run(name: str, into: Path | None = None) -> int:
    """Write the plugin into ``into`` (default: ``weightwire-NAME``); the status is 2 where that cannot be done."""
    folder = into if into is not None else Path(f"weightwire-{name}")
    if fault := _name_fault(name) or _folder_fault(folder):
        complain(fault)
        return 2
    try:
        _write(name, folder)
    except OSError as exc:
        complain(f"nothing was written: {exc}")
        return 2
    print(f"{folder}: the backend {name!r}, complete. Now:\n")
    print(f'    cd {folder}\n    pip install -e ".[test]"\n    weightwire conformance {name}\n')
    print("README.md says how it becomes a transport of your own.")
    return 0


def _name_fault(name: str) -> str:
    short = name.removeprefix("weightwire-").removeprefix("weightwire_")
    proposal = re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")[:_LONGEST].rstrip("-")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or name != short:
        better = f": for example {proposal!r}" if _NAME.fullmatch(proposal) and proposal not in _RESERVED else ""
        return (
            f"{name!r} cannot be the name of a new backend. It is what comes before '://': lower-case letters, digits "
            f"and single hyphens, at most {_LONGEST}, and no 'weightwire-' before it{better}"
        )
    if name in _RESERVED:
        return f"the name {name!r} is Weightwire's own; choose another one"
    for record in available():
        if record.name == name:
            return (
                f"the backend {name!r} is installed already ({record.source}): two of one name would be an error. "
                "Choose another one"
            )
    return ""


def _folder_fault(folder: Path) -> str:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return f"{folder} is there already, and is no folder"
    if folder.is_dir() and any(folder.iterdir()):
        return f"the folder {folder} is not empty: nothing in it is touched. Name another one with --into"
    if not folder.absolute().parent.is_dir():
        return f"there is no folder {folder.absolute().parent}"
    return ""


def _write(name: str, folder: Path) -> None:
    """All or nothing: the plugin is made beside its place, and moved there in one step."""
    parent = folder.absolute().parent
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    try:
        for path, text in files(name):
            target = made / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        made.chmod(0o777 & ~_umask())
        os.rename(made, folder)  # takes the place of an empty folder, and of nothing else
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def files(name: str) -> Iterator[tuple[str, str]]:
    """Path and content of each file of a plugin of this name."""
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield _renamed(path.relative_to(TEMPLATE).as_posix(), name), _renamed(path.read_text("utf-8"), name)


def _renamed(text: str, name: str) -> str:
    """The template's ``mine`` in all its forms. No other word of the template has these letters."""
    identifier = name.replace("-", "_")
    camel = "".join(part.title() for part in name.split("-"))
    text = text.replace("weightwire_mine", f"weightwire_{identifier}")
    return re.sub(r"\bMine(?=[A-Z]|\b)|(?<=Test)Mine\b", camel, re.sub(r"\bmine\b", name, text))
