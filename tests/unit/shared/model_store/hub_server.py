"""A hub on this machine, which speaks as much of the hub's API as its client asks for, and can misbehave."""

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote

import huggingface_hub


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(json.dumps({name: len(data) for name, data in files.items()}).encode()).hexdigest()


@dataclass
class Faults:
    """What goes wrong, each by a file's path."""

    # Bytes after which a connection is cut, one for each response in turn; then none is.
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    # (status, headers) of the next responses; `""`: to the question what the repository holds.
    statuses: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    # What is sent in place of the file, in turn.
    contents: dict[str, list[bytes]] = field(default_factory=dict)
    ignores_ranges: bool = False
    gate: threading.Event | None = None  # held shut, a file's second half waits


@dataclass
class Repository:
    files: dict[str, bytes]
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    listed: list[dict[str, object]] | None = None  # in place of what the files say of themselves
    gated: bool = False
    token: str = ""  # that must be sent


class HubServer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: ClassVar[dict[str, Repository]] = {}
    faults: ClassVar[Faults] = Faults()
    sent: ClassVar[Counter[str]] = Counter()  # bytes of each file that were sent
    fetched: ClassVar[list[str]] = []  # names of files that were asked for, without their folders
    begun: ClassVar[list[tuple[str, int]]] = []  # (file, position) of each answer
    tokens: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.tokens.add(self.headers.get("Authorization", ""))
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self._tell(name, revision)
        else:
            name, _, rest = path.removeprefix("/").partition("/resolve/")
            commit, _, file = rest.partition("/")
            self._serve(name, commit, file)

    def _tell(self, name: str, revision: str) -> None:
        if self._refused(name, ""):
            return
        repository = self.repositories[name]
        states = {"": repository.files, "main": repository.files, **repository.branches}
        states |= {commit_of(files): files for files in states.values()}
        files = states.get(revision)
        if files is None:
            self._send(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = repository.listed
        if siblings is None:
            siblings = [_sibling(path, data) for path, data in files.items()]
        said = {"id": name, "sha": commit_of(files), "siblings": siblings}
        self._send(json.dumps(said).encode())

    def _refused(self, name: str, file: str) -> bool:
        if (waiting := self.faults.statuses.get(file)) and waiting:
            status, headers = waiting.pop(0)
            self._send(b'{"error": "on purpose"}', status, headers)
            return True
        repository = self.repositories.get(name)
        if repository is None:
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
            return True
        if repository.gated and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self._send(b"{}", 403, {"X-Error-Code": "GatedRepo"})
            return True
        return False

    def _serve(self, name: str, commit: str, file: str) -> None:
        if self._refused(name, file):
            return
        repository = self.repositories[name]
        states = {commit_of(files): files for files in (repository.files, *repository.branches.values())}
        whole = states.get(commit, {}).get(file)
        if whole is None:
            self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.fetched.append(file.rpartition("/")[2])
        if replaced := self.faults.contents.get(file):
            whole = replaced.pop(0)
        begin, status, headers = 0, 200, {}
        asked = self.headers.get("Range", "")
        if asked and not self.faults.ignores_ranges:
            begin, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
            if begin >= len(whole):
                self._send(b"", 416)
                return
        self.begun.append((file, begin))
        self._send(whole[begin:], status, headers, file)

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None, file: str = "") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if file and (cuts := self.faults.cut_after.get(file)):
            body = body[: cuts.pop(0)]
            self.close_connection = True
        sent = self.sent  # this hub's: a thread that a client left waiting may end while the next hub serves
        with contextlib.suppress(ConnectionError):
            half = len(body) // 2 if file and self.faults.gate else 0
            for piece in (body[:half], body[half:]):
                self.wfile.write(piece)
                sent[file] += len(piece)
                if half and self.faults.gate:
                    self.faults.gate.wait(60)

    def log_message(self, *_: object) -> None:
        pass


def _sibling(path: str, data: bytes) -> dict[str, object]:
    """Weights lie in large file storage, other files in Git."""
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    told: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": git}
    if path.endswith((".safetensors", ".gguf", ".bin")):
        digest = hashlib.sha256(data).hexdigest()
        told["lfs"] = {"size": len(data), "sha256": digest, "pointerSize": 130}
    return told


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a hub without repositories or faults."""
    HubServer.repositories, HubServer.faults = {}, Faults()
    HubServer.sent, HubServer.fetched, HubServer.tokens = Counter(), [], set()
    HubServer.begun = []
    with ThreadingHTTPServer(("127.0.0.1", 0), HubServer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        huggingface_hub.close_session()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            huggingface_hub.close_session()  # its connections hold the server's threads
            if HubServer.faults.gate is not None:
                HubServer.faults.gate.set()
            server.shutdown()
            thread.join()
