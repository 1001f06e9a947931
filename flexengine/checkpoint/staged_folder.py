"""Files that appear in a folder together: written into a new folder, which takes the old one's place in one rename.

Killed at any moment, a save leaves the folder with all of its old files or with all of its new ones. Where folders
cannot be exchanged (a mount point, a file system without it, the working directory, a parent that takes no files) the
files are renamed one by one, the manifest of their checksums first: a folder that was left in between does not match
its manifest, and loading it is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from flexengine.checkpoint.atomic import (
    naming,
    refuse_folder,
    remove_stale,
    sync_file,
    sync_folder,
    temporary_name,
)
from flexengine.checkpoint.manifest import FOLDER_MANIFEST

_EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
_AT_FDCWD = -100  # paths are relative to the working directory, as those of rename


class StagedFolder:
    """The files of one save before they appear; `staged_folder` makes it.

    stage(name): the path to write a file to. drop(names): files of the folder that shall be gone after the save.
    """

    def __init__(self, folder: Path, work: Path | None) -> None:
        self._folder, self._work = folder, work
        self._staged: dict[str, Path] = {}
        self._dropped: set[str] = set()

    def stage(self, name: str) -> Path:
        """Where to write the file that is to appear as `name`. Raises: IsADirectoryError if a folder has the name."""
        refuse_folder(self._folder / name)  # before gigabytes are written for it
        path = temporary_name(self._folder / name) if self._work is None else self._work / name
        path.parent.mkdir(exist_ok=True)  # a name may be in a folder of its own
        self._staged[name] = path
        return path

    def drop(self, names: Iterable[str]) -> None:
        """Leave out files of the folder, unless they are staged."""
        self._dropped.update(names)

    def commit(self) -> None:
        """Bring all files to the disk, then let them appear."""
        for path in self._staged.values():
            sync_file(path)
        for name in self._staged:
            refuse_folder(self._folder / name)
        if self._work is None or not self._takes_its_place(self._work):
            self._rename_one_by_one()

    def discard(self) -> None:
        """Remove what has not appeared, or the old files in its place."""
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
        else:
            for path in self._staged.values():
                path.unlink(missing_ok=True)

    def _rename_one_by_one(self) -> None:
        for name in sorted(self._staged, key=lambda name: name != FOLDER_MANIFEST):
            os.replace(self._staged[name], self._folder / name)
        for name in self._dropped - self._staged.keys():
            (self._folder / name).unlink(missing_ok=True)
        sync_folder(self._folder)

    def _takes_its_place(self, work: Path) -> bool:
        """Whether the new folder could take the old one's place; `work` then holds the old files, if there were any."""
        exists = self._folder.exists()
        if exists:
            _carry_over(self._folder, work, self._staged.keys() | self._dropped)
        for place in {path.parent for path in self._staged.values()} | {work}:
            sync_folder(place)
        if not exists:
            os.rename(work, self._folder)
        elif not _exchange(work, self._folder):
            return False
        sync_folder(self._folder.parent)
        return True


@contextlib.contextmanager
def staged_folder(folder: Path) -> Iterator[StagedFolder]:
    """Files that appear in `folder` together when the block ends well, and not at all when it raises.

    Other files in the folder stay. A folder that does not exist is made, with its parents; they are removed again when
    the block raises. What killed saves left of this folder is removed first.
    Raises: OSError of the file system, IsADirectoryError if a folder has the name of a file; what the block raises.
    """
    folder = folder.resolve()  # a link to a folder stays one
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            work = _work_folder(folder, held)
            if work is None:
                folder.mkdir(exist_ok=True)
            if folder.exists():
                remove_stale(folder)
            staged = StagedFolder(folder, work)
            try:
                with naming(folder):
                    yield staged
                    staged.commit()
                created = []
            finally:
                staged.discard()
        finally:
            with contextlib.suppress(OSError):  # not empty: somebody else writes there too
                for path in created:
                    if path.exists():
                        path.rmdir()


class _NothingToSaveError(Exception):
    """Ends a save that was only tried."""


def check_takes_files(folder: Path) -> None:
    """Write a small file where a save to `folder` would write, and remove it. Raises: OSError as a save would."""
    with contextlib.suppress(_NothingToSaveError), staged_folder(folder) as staged:
        path = staged.stage("model.safetensors")
        path.write_bytes(bytes(4096))
        sync_file(path)
        raise _NothingToSaveError


def _work_folder(folder: Path, held: contextlib.ExitStack) -> Path | None:
    """A new folder beside `folder`, locked until `held` ends; None where it could not take the other's place.

    Raises: OSError where `folder` does not exist and no folder can be made beside it.
    """
    remove_leftovers(folder.parent, re.escape(folder.name))
    if not folder.exists():
        return _locked_folder(folder, held)
    if os.stat(folder).st_dev != os.stat(folder.parent).st_dev or os.path.ismount(folder):
        return None
    if _is_working_directory(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return None
    try:
        work = _locked_folder(folder, held)
    except OSError:  # the folder above takes none
        return None
    _copy_attributes(folder, work)
    return work


def _locked_folder(folder: Path, held: contextlib.ExitStack) -> Path:
    """A new folder beside `folder` under a lock, by which other processes know that its writer lives."""
    while True:
        work = temporary_name(folder)
        work.mkdir()
        undo = held.enter_context(contextlib.ExitStack())
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # taken for a leftover before it was locked
            if os.path.samestat(os.stat(work), os.fstat(descriptor)):
                undo.pop_all()
                return work


def remove_leftovers(parent: Path, names: str) -> None:
    """Remove what killed saves of folders left in `parent`; what a living one has locked stays.

    names: a regular expression of the folders' names.
    """
    pattern = re.compile(rf"\.{names}\.[0-9a-f]{{16}}\.flexengine\.tmp")
    with contextlib.suppress(OSError):
        for path in [path for path in parent.iterdir() if pattern.fullmatch(path.name)]:
            with contextlib.suppress(OSError):  # a file, locked, or not ours to remove
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)


def _is_working_directory(folder: Path) -> bool:
    """Whether this process works inside `folder`: it would go on in a folder that is removed."""
    with contextlib.suppress(OSError):  # it was removed
        here = Path.cwd()
        return here == folder or folder in here.parents
    return False


def _carry_over(source: Path, target: Path, left_out: Iterable[str]) -> None:
    """Give `target` all that `source` holds but `left_out`, without copying where the file system has hard links."""
    omitted = {*left_out, FOLDER_MANIFEST}  # an old manifest does not describe the new files

    def not_carried(directory: str, names: list[str]) -> set[str]:
        inside = Path(directory).relative_to(source)
        return {name for name in names if str(inside / name) in omitted}

    def link(path: str, to: str) -> None:
        try:
            os.link(path, to, follow_symlinks=False)
        except OSError:
            shutil.copy2(path, to, follow_symlinks=False)

    shutil.copytree(source, target, symlinks=True, ignore=not_carried, copy_function=link, dirs_exist_ok=True)


def _copy_attributes(source: Path, target: Path) -> None:
    shutil.copystat(source, target)
    status = os.stat(source)
    with contextlib.suppress(OSError):  # only root may give files to others
        os.chown(target, status.st_uid, status.st_gid)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step (Linux 3.15, glibc 2.28); false where that is not possible."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return rename is not None and rename(*names, ctypes.c_uint(_EXCHANGE)) == 0
