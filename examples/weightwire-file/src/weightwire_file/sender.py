"""The trainer's end: writes versions and the manifest, reads what workers have written."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weightwire import forks, wire
from weightwire.errors import (
    ClosedError,
    EndpointError,
    EndpointInUseError,
    StaleUpdaterError,
    WaitTimeout,
    WireError,
)
from weightwire.transport import Event, Have, Joined, Left, Lost, Sender, Shelf, Staged, choose
from weightwire_file import container, folder
from weightwire_file.folder import Entry, Manifest
from weightwire_file.locks import held, take

if TYPE_CHECKING:
    from weightwire.endpoint import Endpoint
    from weightwire.transport import Deadline, SenderContext
    from weightwire.weights.payload import Payload
    from weightwire_file import Options

__all__ = ["FileSender"]

logger = logging.getLogger(__name__)

LOOK = 0.2
"""Seconds between two looks at whether the workers live."""
ALL = "\0"
"""A name that no worker can have."""


@dataclass
class Peer:
    """A worker that has joined."""

    name: str
    incarnation: int
    have: Have
    hello: str  # its file


class FileSender(Sender):
    """Has no thread: the folder is looked at whenever the core asks for events."""

    def __init__(self, endpoint: Endpoint, options: Options, context: SenderContext) -> None:
        self.endpoint = str(endpoint)
        self._options = options
        self._root = folder.root(endpoint)
        self._files: dict[int, Path] = {}  # by number: those that are there
        self._peers: dict[str, Peer] = {}  # by label
        self._heard: deque[Event] = deque()
        self._books = threading.RLock()
        self._looked = 0.0
        self._swept = self._closed = False
        self._lock = self._claim()
        try:
            self.epoch, self._home = self._begin(context.epoch)
            self._workers = self._home / folder.WORKERS
            os.mkdir(self._workers, 0o700)
            self._shelf: Shelf[Entry] = Shelf()
            self._write(self._manifest(self._shelf))
        except BaseException:
            os.close(self._lock)
            raise
        forks.forbid(self)

    def in_child(self) -> None:
        forks.give_up(self._lock)

    def _claim(self) -> int:
        path = self._root / folder.LOCK
        try:
            os.makedirs(self._root, 0o700, exist_ok=True)
            lock = take(path, create=True)
        except OSError as exc:
            raise EndpointError(f"{self.endpoint}: cannot write in {self._root}: {exc.strerror}") from exc
        if lock is None:
            raise EndpointInUseError(
                f"a live updater has {self._root} (it holds the lock of {path}): close it, or choose another folder"
            )
        return lock

    def _begin(self, floor: int) -> tuple[int, Path]:
        """A folder of our own, newer than all. Making it is what claims the epoch, whatever becomes of the lock."""
        epoch = max(floor, *(found + 1 for found in folder.epochs(self._root)), 1)
        while True:
            with suppress(FileExistsError):
                home = self._root / str(epoch)
                os.mkdir(home, 0o700)
                return epoch, home
            epoch += 1

    # -- stage ---------------------------------------------------------------------------------------------------------

    def stage(self, payload: Payload, to: frozenset[str] | None, deadline: Deadline) -> None:
        self._fence()
        entry = Entry(payload.stamp, payload.base)
        with self._books:
            shelf = deepcopy(self._shelf)
            shelf.put(entry, to)
            manifest = self._manifest(shelf)
            addressed = {peer.name: peer.incarnation for peer in self._peers.values() if to is None or peer.name in to}
        try:
            path = self._save(payload, manifest, deadline)
        except FileNotFoundError as exc:
            self._fence()  # swept by a newer updater, most likely
            raise StaleUpdaterError(f"{self.endpoint}: {exc.filename} is gone; make a new updater") from exc
        with self._books:
            there = {name for name, number in addressed.items() if self._is_there(name, number)}
            self._shelf.put(entry, None if to is None else frozenset(there))  # some may have left meanwhile
            self._files[payload.stamp.number] = path
            for peer in self._peers.values():
                news = choose(peer.have, *self._shelf.of(peer.name)) if to is None or peer.name in there else None
                if news is not None:
                    self._heard.append(Staged(worker=peer.name, incarnation=peer.incarnation, stamp=payload.stamp))
        self._prune()

    def _is_there(self, name: str, incarnation: int) -> bool:
        return any(peer.name == name and peer.incarnation == incarnation for peer in self._peers.values())

    def _save(self, payload: Payload, manifest: Manifest, deadline: Deadline) -> Path:
        """Write the version, then the manifest that names it. All that can fail for want of room comes first."""
        plan = container.plan(payload.layout)
        size = plan.head_size(payload.header_size)
        path, sync = self._home / folder.version_name(payload.stamp), self._options.sync
        with ExitStack() as drafts:
            version = drafts.enter_context(folder.draft(path, sync=sync))
            version.reserve(8 + size + plan.nbytes)
            news = drafts.enter_context(folder.draft(self._home / folder.MANIFEST, sync=sync))
            text = msgspec.json.encode(manifest)
            news.reserve(len(text))
            try:
                os.pwrite(news.fd, text, 0)
                whole = container.write_blocks(version.fd, 8 + size, plan, payload, deadline)
                if sync:
                    os.fsync(version.fd)
            except OSError as exc:  # a file server that had promised the room
                raise folder.no_room(exc, path, 8 + size + plan.nbytes) from exc
            if not whole:
                raise WaitTimeout(
                    f"{self.endpoint}: the disk had not taken {plan.nbytes} bytes of version {payload.stamp.number} "
                    "when the time was up",
                    version=payload.stamp.number,
                    phase="stage",
                )
            container.write_head(version.fd, size, plan, payload.header_bytes())
            version.commit()
            with payload.phase("notify"):
                news.commit()
        return path

    def _fence(self) -> None:
        newest = folder.epochs(self._root)
        if newest and newest[-1] > self.epoch:
            raise StaleUpdaterError(
                f"{self.endpoint}: an updater of run {newest[-1]} has taken the place of this one, of run "
                f"{self.epoch}, which must not push any more"
            )

    def _manifest(self, shelf: Shelf[Entry], *, closed: bool = False) -> Manifest:
        everybody = shelf.of(ALL)
        pairs = {peer.hello.removesuffix(".hello"): shelf.of(peer.name) for peer in self._peers.values()}
        some = {name: pair for name, pair in pairs.items() if pair != everybody}
        return Manifest(self.epoch, everybody, some, closed)

    def _write(self, manifest: Manifest) -> None:
        folder.publish(self._home / folder.MANIFEST, msgspec.json.encode(manifest), sync=self._options.sync)

    def _prune(self) -> None:
        """Remove versions that nobody can ask for any more; one that is being read, next time."""
        with self._books:
            kept = {entry.stamp.number for entry in self._shelf.kept()}
            kept.update(sorted(self._files)[-self._options.keep :])
            idle = [number for number in self._files if number not in kept]
        for number in idle:
            with suppress(FileNotFoundError):
                lease = take(self._files[number], patience=0.0)
                if lease is None:
                    continue
                try:
                    os.unlink(self._files[number])
                finally:
                    os.close(lease)
            del self._files[number]
        if not self._swept:
            self._swept = True
            folder.sweep(self._root, self.epoch)

    # -- events --------------------------------------------------------------------------------------------------------

    def events(self, deadline: Deadline) -> list[Event]:
        pause = 0.0005
        while True:
            with self._books:
                if self._closed:
                    raise ClosedError(f"the updater of {self.endpoint} is closed")
                self._look()
                heard = list(self._heard)
                self._heard.clear()
            if heard or deadline.expired:
                return heard
            time.sleep(min(pause, deadline.remaining))
            pause = min(2 * pause, self._options.interval)

    def _look(self) -> None:
        """Read what workers have written since the last look."""
        silent = self._silent()
        try:
            names = sorted(os.listdir(self._workers))
        except FileNotFoundError:
            return  # the next push says why
        for name in names:
            if name.endswith(".hello"):
                self._welcome(name)
        for name in names:
            if name.endswith(".report"):
                self._read(name)
        for label in silent:
            if label in self._peers:
                self._part(label, lost="its lock is free: the process has ended")

    def _silent(self) -> list[str]:
        """Workers whose locks are free. What they wrote before is there by now."""
        if time.monotonic() - self._looked < LOOK:
            return []
        self._looked = time.monotonic()
        return [label for label in self._peers if not held(self._workers / f"{label}.lock")]

    def _welcome(self, name: str) -> None:
        label, _, incarnation = name.removesuffix(".hello").partition("-")
        known = self._peers.get(label)
        if known is not None and known.hello == name:
            return
        event = self._event(name)
        if not isinstance(event, Joined) or str(event.incarnation) != incarnation:
            return
        if known is not None:
            if known.incarnation > event.incarnation:
                return
            self._part(label, lost="another process has taken its name")
        self._peers[label] = Peer(event.worker, event.incarnation, event.have, name)
        self._heard.append(event)
        staged = choose(event.have, *self._shelf.of(event.worker))
        if staged is not None:
            self._heard.append(Staged(worker=event.worker, incarnation=event.incarnation, stamp=staged.stamp))

    def _read(self, name: str) -> None:
        event = self._event(name)
        peer = self._peers.get(name.partition("-")[0])
        if event is not None and peer is not None and event.incarnation == peer.incarnation:
            self._heard.append(event)
            if isinstance(event, Left):
                self._part(name.partition("-")[0], lost=None)
        with suppress(FileNotFoundError):
            os.unlink(self._workers / name)

    def _event(self, name: str) -> Event | None:
        try:
            return wire.decode_event((self._workers / name).read_bytes())
        except FileNotFoundError:
            return None
        except WireError as exc:
            logger.warning("%s: %s is left alone: %s", self.endpoint, name, exc)
            return None

    def _part(self, label: str, *, lost: str | None) -> None:
        peer = self._peers.pop(label)
        self._shelf.forget(peer.name)
        if lost is not None:
            self._heard.append(Lost(worker=peer.name, incarnation=peer.incarnation, reason=lost))
        with suppress(FileNotFoundError):
            os.unlink(self._workers / peer.hello)
        with suppress(FileNotFoundError):  # the lock's file, unless the worker removed it, or a new one has its name
            path = self._workers / f"{label}.lock"
            lock = take(path, patience=0.0)
            if lock is not None:
                os.unlink(path)
                os.close(lock)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        with self._books:
            if self._closed:
                return
            self._closed = True
            try:
                self._write(self._manifest(self._shelf, closed=True))
            except (OSError, WireError) as exc:
                logger.warning("%s: could not say goodbye: %s", self.endpoint, exc)
            finally:
                os.close(self._lock)
                self._lock = -1
