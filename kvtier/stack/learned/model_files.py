"""Models of policies, kept over restarts: one sealed file for each.

A file is replaced in one step, so a process that is killed leaves the old one or the new one. A file that is damaged,
of another version or foreign is ignored with a line in the log: the policies begin as they do without any.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.policy import RequestModels
from kvtier.policy.base import MODEL_BYTES_MAX
from kvtier.tier.checksum import BODY_AT, seal, unseal

if TYPE_CHECKING:
    from kvtier.stack.learned.budget_records import BudgetRecord

MAGIC = b"KVTIERML"
VERSION = 1
SAVE_SECONDS = 300.0
"""Interval at which models are written while the stack runs."""
RETRY_SECONDS = 10.0
"""A write that failed is not tried again before."""
_HEAD = struct.Struct("<I32s")
_FILE_BYTES_MAX = BODY_AT + _HEAD.size + MODEL_BYTES_MAX
_log = logging.getLogger(__name__)


def model_path(folder: Path, name: str) -> Path:
    """The file of the model of this name."""
    return folder / f"model-{name}"


def encode(name: str, saved: bytes) -> bytes:
    """A whole file."""
    return seal(MAGIC, _HEAD.pack(VERSION, name.encode()) + saved)


def decode(name: str, data: bytes) -> bytes:
    """Bytes that the model saved. Raises ValueError for a file that is damaged, of another version or model."""
    body = unseal(MAGIC, data)
    if body is None or len(body) < _HEAD.size:
        raise ValueError("it is damaged, or no file of a model")
    version, owner = _HEAD.unpack_from(body)
    if version != VERSION or owner.rstrip(b"\0") != name.encode():
        raise ValueError(f"it is of version {version} and model {owner.rstrip(bytes(1)).decode(errors='replace')!r}")
    return body[_HEAD.size :]


def read(folder: Path, name: str) -> bytes | None:
    """Bytes that a model saved; None if there are none. Raises OSError and ValueError."""
    try:
        fd = os.open(model_path(folder, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _FILE_BYTES_MAX:
            raise ValueError("it is no plain file, or too long")
        return decode(name, file.read(_FILE_BYTES_MAX))


def write(folder: Path, name: str, saved: bytes) -> None:
    """Replace the file of a model. Raises OSError, and ValueError for more than a model may save."""
    if len(saved) > MODEL_BYTES_MAX:
        raise ValueError(f"model {name} would save {len(saved)} bytes; {MODEL_BYTES_MAX} is the most")
    path = model_path(folder, name)
    new = path.with_name(f"{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(encode(name, saved))
        file.flush()
        os.fdatasync(fd)
    os.replace(new, path)


class ModelFiles:
    """The files of one stack's models, in one folder. The models are saved in the control plane's thread.

    With `make_folder` the folder is made when it is missing. Closing waits `close_seconds` at most, or a disk that
    hangs would keep the stack from closing its tiers. Records of `budgets` are written once they have been restored.
    """

    def __init__(
        self,
        folder: Path,
        models: RequestModels,
        make_folder: bool = False,
        budgets: Sequence[BudgetRecord] = (),
        close_seconds: float = math.inf,
    ) -> None:
        self._folder = folder
        self._models = models
        self._to_restore = budgets
        self._budgets: Sequence[BudgetRecord] = ()
        self._make_folder = make_folder
        self._close_seconds = close_seconds
        self._threads = DaemonPool("kvtier-models", 1)
        self._writing: Future[bool] | None = None
        self._save_at: float | None = None
        self._retry_at = -math.inf
        self._failed = False

    async def restore(self, timeout_seconds: float) -> None:
        """Restore the models from their files, before any use. A file that cannot be used is a line in the log."""
        for model in self._models:
            try:
                async with asyncio.timeout(timeout_seconds):
                    saved = await self._threads.run(read, self._folder, model.NAME)
                if saved is not None:
                    model.restore(saved)
            except (OSError, ValueError, TimeoutError) as error:
                path = model_path(self._folder, model.NAME)
                reason = "no answer in time" if isinstance(error, TimeoutError) else error
                _log.warning("%s is not used, what policies learn begins anew: %s", path, reason)
            except BaseException:
                self._threads.shutdown()
                raise

    async def restore_budgets(self, timeout_seconds: float) -> None:
        """Restore the write budgets, once the tiers are open: until then an earlier process may be writing to them.

        A tier whose budget cannot be restored is sent nothing for a day.
        """
        for budget in self._to_restore:
            try:
                async with asyncio.timeout(timeout_seconds):
                    saved = await self._threads.run(read, self._folder, budget.name)
                if saved is not None:
                    budget.restore(saved)
            except (OSError, ValueError, TimeoutError) as error:
                budget.on_lost()
                path = model_path(self._folder, budget.name)
                _log.warning("%s cannot be read, so its tier is sent nothing for a day: %s", path, error)
        self._budgets = self._to_restore
        if self._budgets:
            self._begin(self._budget_records(False))

    def save_if_due(self, now: float) -> None:
        """Begin to write the files if the last time is long ago, and has ended."""
        if self._writing is not None and not self._writing.done():
            return
        self._take_written(now)
        if self._save_at is None:
            self._save_at = now + SAVE_SECONDS
        elif now >= self._save_at:
            self._save_at = now + SAVE_SECONDS
            self.save()
        elif now >= self._retry_at and any(budget.is_due for budget in self._budgets):
            self._begin(self._budget_records(False))

    def save(self, last: bool = False) -> None:
        """Begin to write the files; never waits. After the `last` time no tier is sent anything."""
        self._begin({model.NAME: model.save() for model in self._models} | self._budget_records(last))

    def _budget_records(self, last: bool) -> dict[str, bytes]:
        return {budget.name: budget.save(last) for budget in self._budgets}

    def _begin(self, saved: Mapping[str, bytes]) -> None:
        self._writing = None
        try:
            self._writing = self._threads.submit(self._write, saved)
        except OSError as error:
            self._warn(error)

    def _take_written(self, now: float) -> None:
        """Let bytes be sent that are on record now."""
        if self._writing is None:
            return
        if self._writing.cancelled() or self._writing.exception() is not None or not self._writing.result():
            self._retry_at = now + RETRY_SECONDS
        else:
            for budget in self._budgets:
                budget.on_durable()
        self._writing = None

    def _write(self, saved: Mapping[str, bytes]) -> bool:
        """True if all of it is durable."""
        try:
            if self._make_folder:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, what in saved.items():
                write(self._folder, name, what)
        except (OSError, ValueError) as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: Exception) -> None:
        """Once: the next try is as likely to fail."""
        if not self._failed:
            self._failed = True
            _log.warning("what policies have learned, and what was written, is not kept over a restart: %s", error)

    async def close(self, timeout_seconds: float) -> None:
        """Wait until what was begun is written, at most that long or `close_seconds`."""
        if await self._threads.close(min(timeout_seconds, self._close_seconds)):
            _log.warning("what policies have learned could not be written to %s in time", self._folder)
