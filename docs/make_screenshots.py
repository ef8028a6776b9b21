"""Take the pictures of the documentation: real runs of `top`, `doctor` and the demo, in a terminal of their own.

    python docs/make_screenshots.py            # docs/images/{top,doctor,demo}.svg, and .png beside each

The commands run in a pseudo-terminal; a small emulator keeps what it would show. SVG is written by rich, PNG by Pillow
with the DejaVu font that comes with matplotlib (both are in the extra `bench` of the workspace). Takes about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH, HEIGHT = 132, 60
PLACE = "ipc://cartpole"
IMAGES = Path(__file__).parent / "images"


class Screen:
    """What a terminal shows: enough of one for what rich and plain commands write."""

    _TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[()][0-9A-Z]|\x1b[=>78]|([\r\n\b\a])|([^\x1b\r\n\b\a]+)")

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]  # a character, and the escape sequence of its style
        self.row = self.column = 0
        self.style = ""

    def feed(self, text: str) -> None:
        for arguments, command, control, plain in self._TOKEN.findall(text):
            if plain:
                for character in plain:
                    self._put(character)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.row += 1
                self._room()
            elif command == "m":
                self.style = "" if arguments in ("", "0") else self.style + f"\x1b[{arguments}m"
            elif command == "A":
                self.row = max(0, self.row - int(arguments or 1))
            elif command == "H":
                self.row = self.column = 0
            elif command == "K":
                self.lines[self.row] = [] if arguments in ("1", "2") else self.lines[self.row][: self.column]
            elif command == "J" or (arguments, command) == ("?1049", "h"):
                self.lines, self.row, self.column = [[]], 0, 0

    def _room(self) -> None:
        while len(self.lines) <= self.row:
            self.lines.append([])

    def _put(self, character: str) -> None:
        line = self.lines[self.row]
        line += [(" ", "")] * (self.column + 1 - len(line))
        line[self.column] = (character, self.style)
        self.column += 1

    def texts(self) -> list[Text]:
        """A line each, without what is empty at the end."""
        lines = [Text.from_ansi("".join(f"{style}{c}\x1b[0m" for c, style in line)) for line in self.lines]
        for line in lines:
            line.rstrip()
        while lines and not lines[-1].plain:
            lines.pop()
        return lines


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self.title = " ".join(command)
        self.screen = Screen()
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(WIDTH)}
        arguments = [sys.executable, "-m", *command]
        self.process = subprocess.Popen(
            arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)

    def watch(self, seconds: float, until: str = "") -> bool:
        """Show what comes for some seconds, or until a line holds a text; whether there is more to come."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if until and any(until in line.plain for line in self.screen.texts()):
                return True
            if select.select([self._ours], [], [], min(left, 0.2))[0]:
                try:
                    self.screen.feed(os.read(self._ours, 1 << 16).decode(errors="replace"))
                except OSError:  # the command has ended
                    return False
        return True

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
            self.watch(10)
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        os.close(self._ours)


def write(name: str, title: str, lines: list[Text]) -> None:
    """`name.svg` and `name.png`."""
    if not lines:
        raise RuntimeError(f"{title} has shown nothing")
    width = max(len(line.plain) for line in lines) + 1
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in lines:
            console.print(line, soft_wrap=True)
        svg = console.export_svg(title=title, theme=MONOKAI, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no font is loaded from elsewhere
    svg = svg.replace("Fira Code", "DejaVu Sans Mono")
    IMAGES.joinpath(f"{name}.svg").write_text(svg)
    _draw(lines, width).save(IMAGES / f"{name}.png", optimize=True)
    print(f"{IMAGES / name}.svg, .png: {len(lines)} lines")


def _draw(lines: list[Text], width: int):  # type: ignore[no-untyped-def]
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    fonts = Path(matplotlib.get_data_path(), "fonts", "ttf")
    plain, bold = (ImageFont.truetype(str(fonts / f"DejaVuSansMono{kind}.ttf"), 16) for kind in ("", "-Bold"))
    step, height, margin = plain.getlength("M"), 20, 16
    size = (int(step * width) + 2 * margin, height * len(lines) + 2 * margin)
    image = Image.new("RGB", size, tuple(MONOKAI.background_color))
    pen = ImageDraw.Draw(image)
    console = Console(color_system="truecolor", force_terminal=True, width=width)
    for row, line in enumerate(lines):
        column = 0
        for text, style, _ in line.render(console):
            font = bold if style and style.bold else plain
            for character in text.rstrip("\n"):
                at = (margin + step * column, margin + height * row)
                pen.text(at, character, font=font, fill=_colour(style))
                column += 1
    return image


def _colour(style: Style | None) -> tuple[int, ...]:
    colour = tuple(MONOKAI.foreground_color)
    if style is not None and style.color is not None:
        colour = tuple(style.color.get_truecolor(MONOKAI))
    if style is not None and style.dim:
        colour = tuple((one + other) // 2 for one, other in zip(colour, MONOKAI.background_color, strict=True))
    return colour


def demo_and_top() -> None:
    """A run of the demo, one of whose workers is killed, and what `top` shows of it meanwhile."""
    demo = Terminal("weightwire", "demo", "--backend", PLACE, "--workers", "4", "--seconds", "40")
    top = None
    try:
        if not demo.watch(90, until="return"):
            raise RuntimeError("the demo has ended at once:\n" + "\n".join(map(str, demo.screen.texts())))
        top = Terminal("weightwire", "top", PLACE)
        top.watch(4, until="worker-3")
        workers = [
            child for child in psutil.Process(demo.process.pid).children() if "spawn_main" in str(child.cmdline())
        ]
        workers[-1].kill()
        demo.watch(4)  # its terminal has to be read, or it stops
        top.watch(4, until="losses")
        write("top", top.title, top.screen.texts())
        demo.watch(120)
        write("demo", demo.title, demo.screen.texts())
    finally:
        if top is not None:
            top.end()
        demo.end()


def doctor() -> None:
    terminal = Terminal("weightwire", "doctor", "--workers", "4")
    try:
        terminal.watch(300)
        write("doctor", terminal.title, terminal.screen.texts())
    finally:
        terminal.end()


TAKE = {"demo": demo_and_top, "top": demo_and_top, "doctor": doctor}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*TAKE, []], help="which (default: all)")
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    for take in dict.fromkeys(TAKE[name] for name in args.names or TAKE):
        take()
    return 0


if __name__ == "__main__":
    sys.exit(main())
