"""A worker's end: reads the manifest and the versions that it names, writes reports."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weightwire import forks, wire
from weightwire.errors import EndpointInUseError, WeightwireError, WireError
from weightwire.transport import Delivery, Left, Receiver, choose
from weightwire_file import container, folder
from weightwire_file.folder import Entry, Manifest
from weightwire_file.locks import held, take

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Applied, Deadline, Event, Have, ReceiverContext, Refused
    from weightwire_file import Options

__all__ = ["FileReceiver"]

logger = logging.getLogger(__name__)

LOOK = 0.2
"""Seconds between two looks at everything; in between only the manifest is looked at, by ``stat``."""

Signature = tuple[int, int, int, int]


class FileReceiver(Receiver):
    """Has no thread: the folder is looked at whenever the core polls."""

    def __init__(self, endpoint: Endpoint, options: Options, context: ReceiverContext) -> None:
        self._options, self._context = options, context
        self._root = folder.root(endpoint)
        self._label = folder.label(context.worker)
        self._file = f"{self._label}-{context.incarnation}"
        self._home: Path | None = None  # of the trainer that we have joined
        self._manifest = Manifest(0)
        self._seen: Signature | None = None
        self._looked = 0.0
        self._lock = -1
        self._reports = 0
        self._layouts = wire.LayoutCache()
        self._plan: container.Plan | None = None
        forks.forbid(self)
        self._look()

    def in_child(self) -> None:
        forks.give_up(self._lock)

    # -- poll ----------------------------------------------------------------------------------------------------------

    def poll(self, have: Have, deadline: Deadline | None) -> Delivery | None:
        pause = 0.0005
        while not self.closed:
            self._look()
            entry = choose(have, *self._manifest.of(self._file))
            delivery = None if entry is None else self._read(entry)
            if delivery is not None:
                return delivery
            if entry is None and self._manifest.closed:
                self.closed, self.connected = True, False
            if self.closed or deadline is None or deadline.expired:
                return None
            time.sleep(min(pause, deadline.remaining))
            pause = min(2 * pause, self._options.interval)
        return None

    def _read(self, entry: Entry) -> Delivery | None:
        """``None`` where it is gone meanwhile: then there is a newer one."""
        assert self._home is not None
        path = self._home / folder.version_name(entry.stamp)
        try:
            lease = take(path, shared=True)
        except FileNotFoundError:
            lease = None
        if lease is None:
            self._seen = None
            return None
        try:
            header, array, self._plan = container.read(lease, self._layouts, self._plan)
        except WireError as exc:
            raise WireError(f"{path}: {exc}") from exc
        finally:
            os.close(lease)
        if (header.stamp, header.base) != (entry.stamp, entry.base):
            raise WireError(f"{path} holds version {header.stamp}, where the manifest says {entry.stamp}")
        return Delivery(header, array=array, writable=True)

    # -- looking -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        everything = now - self._looked >= LOOK
        if self._home is not None:
            self._look_at_manifest(self._home, everything)
        if everything and not self._manifest.closed:
            self._looked = now
            self._look_for_trainer()

    def _look_at_manifest(self, home: Path, anyway: bool) -> None:
        try:
            found = os.stat(home / folder.MANIFEST)
        except FileNotFoundError:
            return
        signature = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
        if signature != self._seen or anyway:  # a file server may show the old one's figures for a while
            manifest = folder.read_manifest(home)
            if manifest is not None:
                self._manifest, self._seen = manifest, signature

    def _look_for_trainer(self) -> None:
        epochs = folder.epochs(self._root)
        lives = held(self._root / folder.LOCK)
        mine = self._home is not None and epochs and self._home.name == str(epochs[-1])
        self.connected = bool(mine and lives)
        self.whereabouts = (
            f"nobody has been in {self._root} yet" if not epochs else f"the last trainer in {self._root} is gone"
        )
        if lives and epochs and not mine:
            self._join(self._root / str(epochs[-1]))

    def _join(self, home: Path) -> None:
        """Meet a trainer: take our name there, say hello."""
        manifest = folder.read_manifest(home)
        if manifest is None or manifest.closed:
            return  # it is not there yet, or not any more
        workers = home / folder.WORKERS
        try:
            lock = take(workers / f"{self._label}.lock", create=True)
        except FileNotFoundError:
            return
        if lock is None:
            raise EndpointInUseError(
                f"a worker named {self._context.worker!r} is live at {self._root} already; choose another name"
            )
        try:
            hello = msgspec.structs.replace(self._context.joined, have=self._context.have())
            folder.publish(workers / f"{self._file}.hello", wire.encode_event(hello))
        except BaseException:
            with suppress(OSError):
                os.unlink(workers / f"{self._label}.lock")
            os.close(lock)
            raise
        self._say_goodbye()  # to the one before: where it lives, it has been superseded
        self._leave()
        self._lock, self._home, self._manifest, self._seen = lock, home, manifest, None
        self.connected = True

    def _leave(self) -> None:
        """Take our own files with us, where nobody is there to do it."""
        if self._home is None:
            return
        names = [f"{self._label}.lock"]
        if not self.connected:
            names.append(f"{self._file}.hello")
        for name in names:
            with suppress(OSError):
                os.unlink(self._home / folder.WORKERS / name)
        os.close(self._lock)
        self._lock, self._home = -1, None

    # -- reports -------------------------------------------------------------------------------------------------------

    def report(self, event: Applied | Refused) -> None:
        if self._home is not None and not self._manifest.closed:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        self._reports += 1
        try:
            self._publish(f"{self._file}-{self._reports:012d}.report", event)
        except (OSError, WeightwireError) as exc:  # the trainer will say that it waited for us
            logger.warning("worker %r could not report to %s: %s", self._context.worker, self._root, exc)

    def _publish(self, name: str, event: Event) -> None:
        assert self._home is not None
        folder.publish(self._home / folder.WORKERS / name, wire.encode_event(event))

    def _say_goodbye(self) -> None:
        if self._home is not None:
            self._tell(Left(worker=self._context.worker, incarnation=self._context.incarnation))

    def close(self, deadline: Deadline) -> None:
        if self._home is not None:
            if self._manifest.closed or not held(self._root / folder.LOCK):
                self.connected = False
            else:
                self._say_goodbye()
            self._leave()
        self.connected, self.closed = False, True
