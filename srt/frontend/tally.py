"""L1, all processes that speak HTTP: what they must agree on before a request is taken. Owns how many requests each has
on its way, the names that clients have given to theirs, and whether the server takes any more.

One process keeps this to itself. Of several each writes its own number to a file in shared memory, and a name is a file
in a folder, which only one can create.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence

_CLOSED = 0  # the place of the flag; the numbers of the processes stand behind it


class Tally:
    def __init__(self, folder: str | None = None, process: int = 0, num_processes: int = 1) -> None:
        """Of `num_processes` this is `process`. The first of several makes the folder."""
        self._own = 1 + process
        self._folder = folder
        self._file = None
        if folder is None:
            assert num_processes == 1
            self._numbers = memoryview(bytearray(16)).cast("q")
            self._names: set[str] = set()
        else:
            if process == 0:
                _create(folder, num_processes)
            self._file = open(f"{folder}/numbers", "r+b")  # noqa: SIM115 - its lock is taken as long as this lives
            self._numbers = memoryview(mmap.mmap(self._file.fileno(), 8 * (1 + num_processes))).cast("q")

    @property
    def total(self) -> int:
        """Requests on their way in all processes."""
        return sum(self._numbers) - self._numbers[_CLOSED]

    def take(self, more: int, most: int | None) -> bool:
        """Counts `more` of this process, unless there were more than `most` in all then."""
        if most is None:
            self._numbers[self._own] += more
            return True
        with self._alone():
            if self.total + more > most:
                return False
            self._numbers[self._own] += more
            return True

    def give(self, number: int) -> None:
        self._numbers[self._own] -= number

    @property
    def closed(self) -> bool:
        return bool(self._numbers[_CLOSED])

    def close(self) -> None:
        """No process takes any more requests, from now on."""
        self._numbers[_CLOSED] = 1

    def take_names(self, names: Sequence[str]) -> bool:
        """False, and none is taken, if one of them is taken, or is among them twice."""
        taken: list[str] = []
        for name in names:
            if not self._take_name(name):
                self.give_names(taken)
                return False
            taken.append(name)
        return True

    def give_names(self, names: Sequence[str]) -> None:
        if self._folder is None:
            self._names.difference_update(names)
        else:
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # the main process has died, and all tidy up behind it
                    os.unlink(self._path(name))

    def _take_name(self, name: str) -> bool:
        if self._folder is None:
            is_new = name not in self._names
            self._names.add(name)
            return is_new
        try:
            os.close(os.open(self._path(name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _path(self, name: str) -> str:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=24)
        return f"{self._folder}/{digest.hexdigest()}"

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two processes must not both take the last place. Nothing is done meanwhile that could take long."""
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _create(folder: str, num_processes: int) -> None:
    os.mkdir(folder)
    with open(f"{folder}/numbers", "xb") as file:
        file.write(bytes(8 * (1 + num_processes)))
