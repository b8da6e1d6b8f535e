"""GGUF files of a hub's repository, fetched by the hub's own client from a server on this machine."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
from huggingface_hub import constants

from services.executor.model.loading import checkpoints
from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store import catalog
from shared.model_store import hub as hub_files
from shared.model_store.catalog import ensure_model, is_ready
from shared.model_store.downloads import Verdict
from shared.models import link_gguf, linked_gguf

COMMIT = "0" * 40
FILES = {
    "README.md": b"# A model",
    "model-Q8_0.gguf": b"GGUF eight bits",
    "Q4_K_M/model-Q4_K_M-00001-of-00002.gguf": b"GGUF four bits, one",
    "Q4_K_M/model-Q4_K_M-00002-of-00002.gguf": b"GGUF four bits, two",
}


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fetched: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self._send(json.dumps(tree).encode())
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            self._send(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        elif (found := FILES.get(path.removeprefix(f"/org/name/resolve/{COMMIT}/"))) is not None:
            self._send(found)
            if self.command == "GET":
                self.fetched.append(path.rpartition("/")[2])
        else:
            self._send(b"{}", 404)

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    monkeypatch.setattr(Hub, "fetched", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        yield Hub
        huggingface_hub.close_session()  # its connections hold the server's threads
        server.shutdown()
        thread.join()


def convert(gguf: Path, directory: Path, progress: object, **_: object) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    link_gguf(directory, gguf)


@pytest.mark.parametrize("name", ["org/name:Q8_0", "hf://org/name:q8_0", "org/name:model-Q8_0.gguf"])
def test_the_file_of_a_quantization_is_fetched_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: type[Hub], name: str
) -> None:
    monkeypatch.setattr(catalog, "convert_gguf", convert)
    assert not is_ready(name, tmp_path)
    served, directory = ensure_model(name, tmp_path, lambda *_: None)
    assert served == name.removeprefix("hf://")
    assert hub.fetched == ["model-Q8_0.gguf"]
    assert (directory / "model.gguf").read_bytes() == FILES["model-Q8_0.gguf"]
    assert not (directory / "model.gguf").is_symlink()
    assert list(tmp_path.iterdir()) == [directory], "nothing else is left"
    assert is_ready(name, tmp_path)
    ensure_model(name, tmp_path, lambda *_: None)
    assert len(hub.fetched) == 1


def test_all_parts_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: type[Hub]) -> None:
    monkeypatch.setattr(catalog, "convert_gguf", convert)
    _, directory = ensure_model("org/name:Q4_K_M", tmp_path, lambda *_: None)
    parts = sorted(name for name in FILES if "Q4_K_M" in name)
    assert [link.read_bytes() for link in linked_gguf(directory)] == [FILES[name] for name in parts]
    assert sorted(hub.fetched) == [Path(name).name for name in parts]


def test_what_was_fetched_is_kept_where_it_cannot_be_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: type[Hub]
) -> None:
    def fail(*_: object) -> None:
        raise ModelLoadError("no")

    monkeypatch.setattr(catalog, "convert_gguf", fail)
    with pytest.raises(ModelLoadError):
        ensure_model("org/name:Q8_0", tmp_path, lambda *_: None)
    monkeypatch.setattr(catalog, "convert_gguf", convert)
    ensure_model("org/name:Q8_0", tmp_path, lambda *_: None)
    assert hub.fetched == ["model-Q8_0.gguf"]


def test_what_the_repository_has_is_said(tmp_path: Path, hub: type[Hub]) -> None:
    with pytest.raises(
        ModelLoadError, match=r"no model as Q5_0; there are: Q4_K_M/model-Q4_K_M, model-Q8_0\."
    ):
        ensure_model("org/name:Q5_0", tmp_path, lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"org/other .*could not be fetched"):
        ensure_model("org/other:Q5_0", tmp_path, lambda *_: None)
    with pytest.raises(ModelLoadError, match=r"no config\.json; .* as org/name:Q4_K_M\."):
        ensure_model("org/name", tmp_path, lambda *_: None)
    assert not [name for name in hub.fetched if name.endswith(".gguf")]


@pytest.mark.parametrize("name", ["org/name:", "a b:Q8_0", "org/name:../Q8_0", "a/b/c:Q8_0"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="ORGANISATION/NAME:QUANTIZATION"):
        ensure_model(name, tmp_path, lambda *_: None)


def test_executors_fetch_it_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: type[Hub]
) -> None:
    monkeypatch.setattr(checkpoints, "convert_gguf", convert)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    directory = checkpoints.resolve_model("hf://org/name:Q4_K_M", tmp_path / "cache", lambda *_: None)
    assert len(linked_gguf(directory)) == len(hub.fetched) == 2
    with pytest.raises(ModelLoadError, match="no model as Q9"):
        checkpoints.resolve_model("org/name:Q9", tmp_path / "cache", lambda *_: None)


def test_of_a_model_that_is_not_served_only_the_configuration_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: type[Hub]
) -> None:
    monkeypatch.setitem(FILES, "config.json", b"{}")
    monkeypatch.setitem(FILES, "model.safetensors", b"weights")
    looked = []

    def refused(directory: Path) -> Verdict:
        looked.append(directory)
        return Verdict("other", "It cannot be served.")

    monkeypatch.setattr(hub_files, "verdict_on", refused)
    with pytest.raises(
        ModelLoadError, match=r"It cannot be served\. Of org/name only config.json was downloaded"
    ):
        ensure_model("org/name", tmp_path, lambda *_: None)
    assert hub.fetched == ["config.json"]
    monkeypatch.setattr(hub_files, "verdict_on", lambda directory: Verdict("llama"))
    _, directory = ensure_model("org/name", tmp_path, lambda *_: None)
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert looked == [directory.with_name(".org--name.partial")]
