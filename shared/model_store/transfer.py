"""Files over HTTP into a directory: several at a time, continued where a connection or a process has ended, and used
only when they are what the hub says.

    <directory>/.parts/<key>     what has come of a file so far
    <directory>/.parts/finished  keys of files that lie whole and verified under their own names
    <directory>/<path>           those files

The hub's own client gives addresses, headers and connections (proxy, certificates, token). What it leaves is done here:
it throws away what has come when its process ends, and compares no digests.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self, TypeVar

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status

from shared.errors import ModelLoadError
from shared.model_store.repository import PARTS, RemoteFile

_FINISHED = "finished"
_INTERVAL = 0.25  # seconds between two reports
_CHUNK = 8 << 20
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_REFUSED_RANGE = 416
_PARTIAL_CONTENT = 206

ATTEMPTS = 6  # in a row that bring nothing new, after which a transfer fails
ASKED = 3  # the same for a question to the hub: nobody has waited for anything yet
PAUSE = 1.0  # seconds before the second attempt; twice as many before each further one
MAX_PAUSE = 300.0  # seconds that a server may ask to be left alone; what asks for more is an error

# Of the HTTP library that the hub's client is made with: what it calls its own errors' root.
HttpError: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
_Found = TypeVar("_Found")


class Stopped(Exception):
    """The transfer was given up by whoever began it."""


class Retries:
    """When a request is made again: the same after each failure, begun anew by whatever comes. Pure."""

    def __init__(self, attempts: int = ATTEMPTS) -> None:
        self._attempts, self._first = attempts, PAUSE
        self._failed = 0

    def succeeded(self) -> None:
        self._failed = 0

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait. Raises `error` where it is not worth another attempt."""
        self._failed += 1
        response = getattr(error, "response", None)
        asked = 0.0
        if response is not None:
            if response.status_code not in _TRANSIENT:
                raise error
            asked = _seconds(response.headers.get("Retry-After", ""))
        if self._failed >= self._attempts or asked > MAX_PAUSE:
            raise error
        return max(asked, self._first * float(2 ** (self._failed - 1)))


def _seconds(text: str) -> float:
    return float(text) if text.strip().isdigit() and len(text) < 10 else 0.0


def persistently(ask: Callable[[], _Found], stop: threading.Event) -> _Found:
    """What `ask` returns; made again where that may help. Raises what it raises in the end, and `Stopped`."""
    retries = Retries(ASKED)
    while True:
        try:
            return ask()
        except HttpError as error:
            if stop.wait(retries.pause_after(error)):
                raise Stopped from None


class _Part:
    """A file on its way: as many bytes as have come, and their digest so far."""

    def __init__(self, path: Path, file: RemoteFile, tell: Callable[[int], None]) -> None:
        """`tell` is told of bytes that are there, and with less than 0 of those that are not any more."""
        self._stream = path.open("a+b", buffering=0)
        self._file, self._tell = file, tell
        self.size = 0
        self._hasher = file.hasher()
        if path.stat().st_size > file.size:
            self._stream.truncate(0)
        self._stream.seek(0)
        while chunk := self._stream.read(_CHUNK):
            self._count(chunk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, chunk: bytes) -> None:
        if self.size + len(chunk) > self._file.size:
            raise ModelLoadError(
                f"More than the {self._file.size} bytes come that the hub lists for {self._file.path}; what serves it "
                "is no hub, or changes files: check HF_ENDPOINT and the proxy."
            )
        left = memoryview(chunk)
        while left:
            left = left[self._stream.write(left) or 0 :]
        self._count(chunk)

    def restart(self) -> None:
        self._stream.truncate(0)
        self._tell(-self.size)
        self.size = 0
        self._hasher = self._file.hasher()

    def is_right(self) -> bool:
        return self._hasher is None or self._hasher.hexdigest() == self._file.digest

    def _count(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self._hasher is not None:
            self._hasher.update(chunk)
        self._tell(len(chunk))


class Transfer:
    """Files of one state of a repository into one directory, which nobody else works in meanwhile."""

    def __init__(self, directory: Path, commit: str, headers: Mapping[str, str], *, files_at_once: int) -> None:
        self._directory = directory
        self.commit = commit
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self._files_at_once = files_at_once
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._done = 0  # bytes that are there, of all files

    def missing(self, files: Sequence[RemoteFile]) -> int:
        """Bytes of `files` that have not come yet."""
        finished = self._finished()
        return sum(max(0, file.size - self._held(file)) for file in files if not self._is_there(file, finished))

    def fetch(
        self, files: Mapping[str, RemoteFile], report: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Fetches `files`, by their addresses; calls `report` with bytes done and in all, from this thread alone.

        Raises `ModelLoadError` where a file is not what the hub lists, the errors of the hub's client, and `OSError`
        where the directory cannot take it. What has come stays for the next time.
        """
        (self._directory / PARTS).mkdir(parents=True, exist_ok=True)
        total = sum(file.size for file in files.values())
        finished = self._finished()
        largest_first = sorted(files.items(), key=lambda item: -item[1].size)
        with ThreadPoolExecutor(self._files_at_once, "download") as pool:
            pending = {pool.submit(self._fetch, url, file, finished) for url, file in largest_first}
            try:
                while pending:
                    done, pending = wait(pending, _INTERVAL, FIRST_COMPLETED)
                    report(min(self._done, total), total)
                    _raise_first(done, pending)
            except BaseException:
                self.stop.set()
                raise

    def _fetch(self, url: str, file: RemoteFile, finished: frozenset[str]) -> None:
        if self.stop.is_set():
            return
        target = self._directory / file.path
        if self._is_there(file, finished):
            self._add(file.size)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in (1, 2):
            with _Part(self._part(file), file, self._add) as part:
                self._complete(url, file, part)
                if part.is_right():
                    break
                part.restart()
                if attempt == 2:
                    self._part(file).unlink()
                    raise ModelLoadError(
                        f"What comes as {file.path} is not what the hub lists, by its SHA-256 or Git digest "
                        f"{file.digest}, and was not when it was fetched again; a mirror or proxy changes it: check "
                        "HF_ENDPOINT and the proxy, or name another revision."
                    )
        self._part(file).replace(target)
        with self._lock, (self._directory / PARTS / _FINISHED).open("a", encoding="ascii") as record:
            record.write(f"{self._key(file)}\n")

    def _add(self, count: int) -> None:
        with self._lock:
            self._done += count

    def _complete(self, url: str, file: RemoteFile, part: _Part) -> None:
        retries, most = Retries(), part.size
        while part.size < file.size:
            error: Exception
            try:
                self._receive(url, part)
                error = ModelLoadError(
                    f"Only {part.size} of the {file.size} bytes of {file.path} come that the hub lists; try again, or "
                    "check HF_ENDPOINT and the proxy."
                )
            except HttpError as raised:
                error = raised
            if part.size > most:  # a server that ignores ranges and breaks off brings nothing new
                retries.succeeded()
                most = part.size
            if part.size < file.size and self.stop.wait(retries.pause_after(error)):
                raise Stopped

    def _receive(self, url: str, part: _Part) -> None:
        """As much of the file as comes over one connection."""
        headers = {**self._headers, **({"Range": f"bytes={part.size}-"} if part.size else {})}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.status_code == _REFUSED_RANGE:
                part.restart()
                return
            hf_raise_for_status(response)
            if part.size and not _continues(response, part.size):
                part.restart()
            for chunk in response.iter_bytes():
                if self.stop.is_set():
                    raise Stopped
                part.write(chunk)

    def _finished(self) -> frozenset[str]:
        try:
            return frozenset((self._directory / PARTS / _FINISHED).read_text(encoding="ascii").split("\n"))
        except FileNotFoundError:
            return frozenset()

    def _is_there(self, file: RemoteFile, finished: frozenset[str]) -> bool:
        with contextlib.suppress(OSError):
            return self._key(file) in finished and (self._directory / file.path).stat().st_size == file.size
        return False

    def _held(self, file: RemoteFile) -> int:
        with contextlib.suppress(OSError):
            return self._part(file).stat().st_size
        return 0

    def _part(self, file: RemoteFile) -> Path:
        return self._directory / PARTS / self._key(file)

    def _key(self, file: RemoteFile) -> str:
        """Of a file's name and content: what has come of another content is never continued with."""
        text = f"{file.path}\0{file.size}\0{file.digest or self.commit}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _raise_first(done: set["Future[None]"], pending: set["Future[None]"]) -> None:
    """The first error of those that are done; the others need not begin."""
    for future in done:
        if (error := future.exception()) is not None:
            for other in pending:
                other.cancel()
            raise error


def _continues(response: Any, position: int) -> bool:
    """Whether a response begins at `position` of the file; else the server has ignored the range."""
    begins = str(response.headers.get("Content-Range", "")).removeprefix("bytes ").partition("-")[0]
    return response.status_code == _PARTIAL_CONTENT and begins == str(position)
