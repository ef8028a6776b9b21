"""Every snippet of the documentation is run, or says why not.

A page is a story: its blocks run in order, in one folder and one namespace.

======================================  ==========================================================================
a fence of ``python``                   is run
... of ``python title="worker.py"``     is a file of that name (so are other languages with a title)
... of ``console``                      lines after ``$`` are run by bash, what follows is their standard output (of one
                                        that fails: standard error; ``...`` is anything); with ``&`` at the end they
                                        run in the background, to a good end
... of ``py``                           is a piece of a file that is elsewhere, or signatures: it has to be well-formed
... of ``toml``, ``json``, ``yaml``     has to be well-formed
... of ``text``                         is for people
``<!-- setup ... -->``                  Python that runs and is not shown
``<!-- raises: SomeError -->``          the block below ends with that error
``<!-- soak: why -->``                  the block below (or what ``<!-- setup soak`` begins) takes long: it is run by
                                        ``make soak``, with all others of its page
``<!-- not run: why -->``               the block below is not run, which needs one of the few reasons below
======================================  ==========================================================================

The folder is one with a checkout's ``core``, ``plugins``, ``examples`` and ``benchmarks`` in it. On a page that
installs something, commands run in a virtual environment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
SECONDS = 200.0
"""What one command in a page may take, on a busy machine. All pages together should take 80 s, without the soak's."""
REASONS = ("it needs a GPU", "it needs a second machine")
"""Why a block may not be run."""

sys.path.insert(0, str(ROOT / "scripts"))
from docs_generated import expand  # noqa: E402

BLOCK = re.compile(
    r"^<!-- setup(?P<later> soak)?\n(?P<setup>.*?)^-->$"
    r"|(?:^[ ]*<!-- (?P<told>raises|soak|not run): (?P<what>.+?) -->\n)?"
    r"^(?P<indent>[ ]*)(?P<fence>```+)(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=indent)(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
PORT = re.compile(r"nccl://127\.0\.0\.1:(\d+)")
"""Ports that pages choose; another program may have them where the tests run."""
TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    line: int
    language: str
    title: str
    code: str
    raises: str = ""
    soak: str = ""
    not_run: str = ""


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, with the line on which their code begins."""
    for found in BLOCK.finditer(text):
        name = "setup" if found["setup"] is not None else "code"
        line = text.count("\n", 0, found.start(name)) + 1
        if name == "setup":
            yield Block(line, "python", "", found["setup"], soak=found["later"] or "")
            continue
        info = found["info"].strip()
        title = TITLE.search(info)
        told = {found["told"]: found["what"]}
        code = dedent(found["code"])
        yield Block(
            line,
            info.partition(" ")[0],
            title[1] if title else "",
            code,
            told.get("raises", ""),
            told.get("soak", ""),
            told.get("not run", ""),
        )


class Story:
    """A page that is being run; ``scripts`` is where its commands are looked for first."""

    def __init__(self, page: str, folder: Path, scripts: Path = Path(sys.executable).parent, *, soak: bool = False):
        self.page = page
        self.folder = folder
        self.scripts = scripts
        self.soak = soak
        self.names: dict[str, Any] = {"__name__": "__page__"}

    def run(self, block: Block) -> None:
        if block.not_run or (block.soak and not self.soak):
            return
        if block.language in ("toml", "json", "yaml"):
            well_formed(block)
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
            if block.language == "python":
                compile(block.code, block.title, "exec")
        elif block.language == "python":
            self.python(block)
        elif block.language == "console":
            self.console(block)
        elif block.language == "py":
            complete(block.code)
        else:
            assert block.language in ("text", "toml", "json", "yaml"), f"{block}: of which language is this block?"

    def python(self, block: Block) -> None:
        # The lines above let a traceback point into the page.
        code = compile("\n" * (block.line - 1) + block.code, str(DOCS / self.page), "exec")
        if not block.raises:
            exec(code, self.names)
            return
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its name is looked at
            exec(code, self.names)
        assert type(caught.value).__name__ == block.raises, caught.value

    def console(self, block: Block) -> None:
        background: list[subprocess.Popen[str]] = []
        try:
            for command, expected in commands(block.code):
                if command.startswith("cd "):
                    self.folder = self.folder / command.removeprefix("cd ")
                    continue
                if command.endswith("&"):
                    background.append(self.start(command.removesuffix("&")))
                    continue
                process = self.start(command)
                try:
                    out, err = process.communicate(timeout=SECONDS)
                finally:
                    end(process)
                assert process.returncode == int(bool(block.raises)), f"{command}:\n{out}{err}"
                printed = err if block.raises else out
                assert like(expected, printed), f"{command} printed\n{out}{err}\nnot\n{expected}"
            for process in background:
                out, err = process.communicate(timeout=SECONDS)
                assert process.returncode == 0, f"{process.args!r}:\n{out}{err}"
        finally:
            for process in background:
                end(process)

    def start(self, command: str) -> subprocess.Popen[str]:
        here = [str(self.scripts), str(Path(sys.executable).parent)]
        path = os.pathsep.join([*here, os.environ.get("PATH", "")])
        # `exec`, so that a kill reaches the command and not only its shell.
        return subprocess.Popen(
            ["bash", "-c", f"exec env {command}"],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"},
            start_new_session=True,  # what it starts itself is ended with it
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> None:
        """Close what the page left open."""
        from weightwire import WeightReceiver, WeightUpdater

        for value in self.names.values():
            if isinstance(value, WeightReceiver):
                value.close()
        for value in self.names.values():
            if isinstance(value, WeightUpdater):
                value._shut(None)  # failures that a page leaves untold are its business


def end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def complete(code: str) -> None:
    """Whether this is code, or signatures."""
    try:
        compile(code, "page", "exec")
    except SyntaxError:
        for signature in re.split(r"\n(?=\w)", code.strip()):
            compile(f"def {signature}: ...", "page", "exec")


def commands(code: str) -> Iterator[tuple[str, str]]:
    """What is typed, and what it prints."""
    assert code.startswith("$ "), f"a console block begins with $, not with {code[:40]!r}"
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def like(expected: str, printed: str) -> bool:
    """Whether a text is what was expected, where ``...`` stands for anything, and blanks count as one."""

    def plain(text: str) -> str:
        return re.sub(r"[ \t]+", " ", "\n".join(map(str.strip, text.strip().splitlines())))

    pattern = ".*".join(map(re.escape, plain(expected).split("...")))
    return re.fullmatch(pattern, plain(printed), re.DOTALL) is not None


def well_formed(block: Block) -> None:
    if block.language == "toml":
        tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
        tomllib.loads(block.code)
    elif block.language == "json":
        json.loads(block.code)
    else:
        pytest.importorskip("yaml").safe_load(block.code)


TEXTS = {page: expand((DOCS / page).read_text()) for page in PAGES}
LONG = [page for page in PAGES if any(block.soak for block in blocks(TEXTS[page]))]


@pytest.fixture
def tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: Callable[[Path], Path]
) -> Iterator[Callable[..., None]]:
    """``tell(page)``: run it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHTWIRE_JOB", uuid.uuid4().hex)  # apart from whatever else runs on this machine
    monkeypatch.syspath_prepend(str(tmp_path))
    for part in ("core", "plugins", "examples", "benchmarks"):
        tmp_path.joinpath(part).symlink_to(ROOT / part)
    stories: list[Story] = []

    def run(page: str, *, soak: bool = False) -> None:
        text = TEXTS[page]
        for port in sorted(set(PORT.findall(text))):
            text = text.replace(f":{port}", f":{free_port()}")
        installs = re.search(r"^\$ pip install", text, re.MULTILINE)
        scripts = environment(tmp_path / "environment").parent if installs else Path(sys.executable).parent
        stories.append(Story(page, tmp_path, scripts, soak=soak))
        for block in blocks(text):
            stories[0].run(block)

    yield run
    for story in stories:
        story.end()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES)
def test_snippets(page: str, tell: Callable[..., None]) -> None:
    tell(page)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", LONG)
def test_long_snippets(page: str, tell: Callable[..., None]) -> None:
    tell(page, soak=True)


def test_what_is_not_run_could_not_be() -> None:
    for page, text in TEXTS.items():
        for block in blocks(text):
            assert not block.not_run or block.not_run in REASONS, f"{page}:{block.line}: {block.not_run}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_every_fence_is_seen() -> None:
    """What the pattern above misses would not be run."""
    for page, text in TEXTS.items():
        fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
        seen = sum(len(re.findall(r"^\s*```", found[0], re.MULTILINE)) for found in BLOCK.finditer(text))
        assert seen == fences, f"{page}: {fences} lines open or close a block, {seen} of them are understood"


def test_the_runner_can_fail(tmp_path: Path) -> None:
    story = Story("index.md", tmp_path)

    def run(text: str) -> None:
        for block in blocks(text):
            story.run(block)

    run("<!-- setup\nx = 1\n-->\n```python\nx += 1\n```\n<!-- not run: no -->\n```python\n1 / 0\n```\n")
    assert story.names["x"] == 2
    later = "<!-- setup soak\nx += 1\n-->\n<!-- soak: long -->\n```python\nx += 1\n```\n"
    run(later)
    assert story.names["x"] == 2
    story.soak = True
    run(later)
    assert story.names["x"] == 4
    run("<!-- raises: ZeroDivisionError -->\n```python\n1 / 0\n```\n")
    run('```python title="a.py"\nprint("one two")\n```\n```console\n$ python a.py\none ...\n```\n')
    for wrong in (
        "```python\n1 / 0\n```\n",
        "<!-- raises: KeyError -->\n```python\n1 / 0\n```\n",
        "<!-- raises: KeyError -->\n```python\n1 + 1\n```\n",
        "```console\n$ python a.py\ntwo\n```\n",
        "```console\n$ python -c 'raise SystemExit(1)'\n```\n",
        "```console\n$ python -c 'raise SystemExit(1)' &\n```\n",
        "```toml\n= 1\n```\n",
        "```\nwhat is this?\n```\n",
    ):
        with pytest.raises((AssertionError, ZeroDivisionError, ValueError, pytest.fail.Exception)):
            run(wrong)
