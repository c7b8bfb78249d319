"""The registry client against a real HTTP server that misbehaves in every way registries do."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from base.config import Config
from base.errors import CedanaError, NotFoundError
from oci import http, registry
from oci.errors import AuthError, DigestError, StoreError
from oci.http import is_plain
from oci.manifest import IMAGE_MANIFEST
from oci.reference import Reference
from oci.registry import Repository
from oci.store import Descriptor

BODY = b"0123456789" * 1000
DIGEST = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
BLOB = Descriptor("a/b", DIGEST, len(BODY))
MANIFEST = b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json"}'


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Close the connection after so many bytes of the body."""
    delay_s: float = 0


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query)


class Server:
    """Answers each request with what `answer` returns; keeps what was asked."""

    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        self.requests: list[Request] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {key.lower(): value for key, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                server.requests.append(request)
                answer = server.answer(request)
                time.sleep(answer.delay_s)
                self.send_response(answer.status)
                for key, value in answer.headers.items():
                    self.send_header(key, value)
                if "Content-Length" not in answer.headers:
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    with contextlib.suppress(ConnectionError):
                        self.wfile.write(answer.body[: answer.cut])
                if answer.cut is not None:
                    self.close_connection = True

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

            def log_message(self, *args: object) -> None: ...

        self.answer = answer
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.host = f"127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def repository(self, name: str = "team/web") -> Repository:
        return Repository(Reference(self.host, name), Config())

    def asked(self, method: str) -> list[Request]:
        return [request for request in self.requests if request.method == method]

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[Request], Answer]], Server]]:
    servers: list[Server] = []

    def start(answer: Callable[[Request], Answer]) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_FIRST_DELAY_S", 0.01)


def log_in(tmp_path: Path, host: str, user: str = "ann", password: str = "secret") -> None:
    directory = tmp_path / "docker"
    directory.mkdir(exist_ok=True)
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    (directory / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


Serve = Callable[[Callable[[Request], Answer]], Server]


def error_body(code: str, message: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()


@pytest.mark.parametrize(
    ("status", "kind", "told", "attempts"),
    [
        (401, AuthError, r"denies access to team/web \(401\)", 1),
        (403, AuthError, r"denies access to team/web \(403\)", 1),
        (404, NotFoundError, "there is no .*team/web:x", 1),
        (400, StoreError, "answers 400 to the request to get the manifest x", 1),
        (429, StoreError, "answers 429", 4),
        (500, StoreError, "answers 500", 4),
        (503, StoreError, "answers 503", 4),
    ],
)
def test_refusal_is_told_in_a_sentence(
    serve: Serve, status: int, kind: type[CedanaError], told: str, attempts: int
) -> None:
    server = serve(lambda request: Answer(status, error_body("DENIED", "not for you")))
    with pytest.raises(kind, match=told) as raised:
        server.repository().manifest("x")
    assert len(server.requests) == attempts
    if status not in (404, 401):
        assert "not for you" in raised.value.details
    assert raised.value.hint or status == 400


def test_answer_that_gets_better_is_waited_for(serve: Serve) -> None:
    answers = iter([Answer(503), Answer(429, headers={"Retry-After": "0"}), Answer(200, MANIFEST)])
    server = serve(lambda request: next(answers))
    assert server.repository().manifest("x")[1] == MANIFEST


def test_refused_connection_is_told_within_seconds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(StoreError, match="refuses connections: could not get the manifest") as raised:
        Repository(Reference(f"127.0.0.1:{port}", "web"), Config()).manifest("x")
    assert time.monotonic() - began < 3
    assert "check the address" in raised.value.hint


def test_unknown_host_is_told_within_seconds() -> None:
    with pytest.raises(StoreError, match=r"name that cannot be resolved|cannot be reached"):
        Repository(Reference("registry.invalid:5000", "web"), Config()).manifest("x")


def test_silent_registry_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_ANSWER_TIMEOUT_S", 0.3)
    server = serve(lambda request: Answer(200, delay_s=2))
    with pytest.raises(StoreError, match="stopped answering"):
        server.repository().manifest("x")
    assert len(server.requests) == 1


def test_registry_that_stops_reading_an_upload_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http, "_DATA_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def begin_and_fall_asleep() -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 202 OK\r\nLocation: /up\r\nContent-Length: 0\r\n\r\n")
            connections.append(connection)

        connections: list[socket.socket] = []
        thread = threading.Thread(target=begin_and_fall_asleep, daemon=True)
        thread.start()
        began = time.monotonic()
        with pytest.raises(StoreError, match="stopped answering"):
            Repository(Reference(f"127.0.0.1:{port}", "web"), Config()).write("a/b", [bytes(64 << 20)])
        assert time.monotonic() - began < 5
        thread.join()
        connections[0].close()


def test_short_name_on_docker_hub_is_an_official_image() -> None:
    assert str(Repository(Reference("docker.io", "redis"), Config())) == "docker.io/library/redis"


def test_registry_that_speaks_plain_http_is_told_where_tls_was_tried(serve: Serve) -> None:
    server = serve(lambda request: Answer(200))
    client = http.Client(server.host, Config())
    client.url = client.url.replace("http:", "https:")
    with pytest.raises(StoreError, match="cannot be spoken to by TLS") as raised:
        client.fetch("GET", "/v2/", http.Scope("web", "pull"), "look")
    assert "plain_http" in raised.value.hint


@pytest.mark.parametrize(
    ("registry_name", "plain"),
    [
        ("localhost:5000", True),
        ("127.0.0.1", True),
        ("127.8.9.1:80", True),
        ("[::1]:5000", True),
        ("localhost:443", False),
        ("10.0.0.1:5000", False),
        ("docker.io", False),
        ("lab:5000", True),
        ("127.0.0.1.example", False),
    ],
)
def test_only_loopback_and_configured_registries_go_without_tls(registry_name: str, plain: bool) -> None:
    assert is_plain(registry_name, Config(plain_http=("lab:5000",))) is plain


def test_manifest_with_other_content_than_its_digest_is_refused(serve: Serve) -> None:
    server = serve(lambda request: Answer(200, MANIFEST))
    with pytest.raises(DigestError, match="other content"):
        server.repository().manifest("sha256:" + "0" * 64)
    server.answer = lambda request: Answer(200, MANIFEST, {"Docker-Content-Digest": "sha256:" + "0" * 64})
    with pytest.raises(DigestError, match="other content"):
        server.repository().manifest("x")


def test_endless_manifest_is_not_read(serve: Serve) -> None:
    server = serve(lambda request: Answer(200, bytes(9 << 20)))
    with pytest.raises(StoreError, match=r"more than|larger than"):
        server.repository().manifest("x")


def ranged(request: Request, body: bytes = BODY) -> Answer:
    """A blob as a proper server sends it."""
    if "range" not in request.headers:
        return Answer(200, body)
    first, last = (int(text) for text in request.headers["range"].removeprefix("bytes=").split("-"))
    return Answer(206, body[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(body)}"})


def read(repository: Repository, offset: int = 0, length: int | None = None) -> bytes:
    with repository.open(BLOB, offset, length) as reader:
        return b"".join(iter(lambda: reader.read(700), b""))


def test_broken_download_goes_on_where_it_broke_off(serve: Serve) -> None:
    def flaky(request: Request) -> Answer:
        answer = ranged(request)
        return Answer(answer.status, answer.body, answer.headers, cut=3333)

    server = serve(flaky)
    assert read(server.repository()) == BODY
    ranges = [request.headers.get("range", "") for request in server.requests]
    assert ranges[0] == ""
    assert len(ranges) > 2
    assert ranges[1].startswith("bytes=")


def test_download_that_breaks_again_at_the_same_place_ends(serve: Serve) -> None:
    server = serve(lambda request: Answer(200, BODY, cut=0))
    with pytest.raises(StoreError, match="could not get the blob"):
        read(server.repository())
    assert len(server.requests) <= 5


def test_range_is_cut_out_where_the_server_ignores_it(serve: Serve) -> None:
    server = serve(lambda request: Answer(200, BODY))
    assert read(server.repository(), 1234, 4321) == BODY[1234 : 1234 + 4321]
    assert server.requests[0].headers["range"] == "bytes=1234-5554"


def test_range_is_asked_for_and_read(serve: Serve) -> None:
    server = serve(ranged)
    assert read(server.repository(), 9990) == BODY[9990:]
    assert read(server.repository(), 0, 10) == BODY[:10]


def test_downloaded_blob_is_verified(serve: Serve) -> None:
    server = serve(lambda request: Answer(200, BODY[:-1] + b"x"))
    with pytest.raises(DigestError, match=DIGEST):
        read(server.repository())


def test_missing_blob_is_told(serve: Serve) -> None:
    server = serve(lambda request: Answer(404, error_body("BLOB_UNKNOWN", "unknown")))
    with pytest.raises(StoreError, match="does not have a blob"):
        read(server.repository())
    assert server.repository().exists(BLOB) is False


def test_redirected_download_does_not_carry_the_credentials(serve: Serve, tmp_path: Path) -> None:
    storage = serve(lambda request: Answer(200, BODY))

    def answer(request: Request) -> Answer:
        if "authorization" not in request.headers:
            return Answer(401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        return Answer(307, headers={"Location": f"http://{storage.host}/bucket"})

    server = serve(answer)
    log_in(tmp_path, server.host)
    assert read(server.repository()) == BODY
    assert "authorization" not in storage.requests[0].headers


class Uploads:
    """Uploads as a registry takes them, with faults: answers taken from `faults` come first."""

    def __init__(self, faults: dict[str, list[Answer]] | None = None, mount: bool = False) -> None:
        self.data = b""
        self.blobs: dict[str, bytes] = {}
        self.faults = faults or {}
        self.mount = mount

    def __call__(self, request: Request) -> Answer:
        if self.faults.get(request.method):
            return self.faults[request.method].pop(0)
        location = {
            "Location": "/v2/team/web/blobs/uploads/u1?_state=abc",
            "Range": f"0-{len(self.data) - 1}",
        }
        match request.method:
            case "HEAD":
                return Answer(200 if request.path.rpartition("/")[2] in self.blobs else 404)
            case "POST" if self.mount and "mount" in request.query:
                return Answer(201)
            case "POST":
                self.data = b""
                return Answer(202, headers=location)
            case "GET":
                return Answer(204, headers=location)
            case "PATCH":
                start = int(request.headers["content-range"].split("-")[0])
                if start != len(self.data):
                    return Answer(416, headers=location)
                self.data += request.body
                return Answer(202, headers={**location, "Range": f"0-{len(self.data) - 1}"})
            case "PUT":
                self.data += request.body
                digest = request.query["digest"][0]
                assert request.query["_state"] == ["abc"]
                if digest != f"sha256:{hashlib.sha256(self.data).hexdigest()}":
                    return Answer(400, error_body("DIGEST_INVALID", "wrong"))
                self.blobs[digest] = self.data
                return Answer(201)
        return Answer(204)


def test_blob_in_memory_goes_up_in_two_requests(serve: Serve) -> None:
    uploads = Uploads()
    server = serve(uploads)
    blob = server.repository().write("a/b", [BODY[:5000], memoryview(BODY)[5000:]])
    assert (blob.digest, blob.size) == (DIGEST, len(BODY))
    assert uploads.blobs == {DIGEST: BODY}
    assert [request.method for request in server.requests] == ["POST", "PUT"]


def test_short_stream_goes_up_like_a_blob_in_memory(serve: Serve) -> None:
    server = serve(Uploads())
    assert server.repository().write("a/b", iter([BODY])).digest == DIGEST
    assert [request.method for request in server.requests] == ["POST", "PUT"]


def test_long_stream_goes_up_in_parts(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PART_BYTES", 3000)
    uploads = Uploads()
    server = serve(uploads)
    blob = server.repository().write("a/b", iter([BODY[i : i + 1000] for i in range(0, 10000, 1000)]))
    assert uploads.blobs == {blob.digest: BODY}
    ranges = [request.headers["content-range"] for request in server.asked("PATCH")]
    assert ranges == ["0-2999", "3000-5999", "6000-8999", "9000-9999"]


def test_part_that_failed_goes_up_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PART_BYTES", 3000)
    uploads = Uploads({"PATCH": [Answer(500), Answer(502)]})
    server = serve(uploads)
    blob = server.repository().write("a/b", iter([BODY[:6000], BODY[6000:]]))
    assert uploads.blobs == {blob.digest: BODY}


def test_part_that_arrived_though_its_answer_was_lost_is_not_sent_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PART_BYTES", 6000)
    uploads = Uploads()
    lost = iter([True])

    def answer(request: Request) -> Answer:
        proper = uploads(request)
        return Answer(502) if request.method == "PATCH" and next(lost, False) else proper

    server = serve(answer)
    blob = server.repository().write("a/b", iter([BODY[:6000], BODY[6000:]]))
    assert uploads.blobs == {blob.digest: BODY}
    assert len(server.asked("PATCH")) == 2


def test_upload_that_failed_begins_anew(serve: Serve) -> None:
    uploads = Uploads({"PUT": [Answer(500), Answer(503)]})
    server = serve(uploads)
    assert server.repository().write("a/b", [BODY]).digest == DIGEST
    assert len(server.asked("POST")) == 3


def test_upload_that_was_taken_though_its_answer_was_lost_is_not_repeated(serve: Serve) -> None:
    uploads = Uploads()
    lost = iter([True])

    def answer(request: Request) -> Answer:
        proper = uploads(request)
        return Answer(504) if request.method == "PUT" and next(lost, False) else proper

    server = serve(answer)
    assert server.repository().write("a/b", [BODY]).digest == DIGEST
    assert len(server.asked("PUT")) == 1


def test_failed_upload_is_cancelled_and_told(serve: Serve) -> None:
    server = serve(Uploads({"PUT": [Answer(413, b"too large for nginx")]}))
    with pytest.raises(StoreError, match="answers 413 to the request to upload a blob") as raised:
        server.repository().write("a/b", [BODY])
    assert "limits the size" in raised.value.hint
    assert raised.value.details == "too large for nginx"
    assert len(server.asked("DELETE")) == 1


def test_location_on_another_host_without_tls_is_refused(serve: Serve) -> None:
    server = serve(lambda request: Answer(202, headers={"Location": "http://evil.example/up"}))
    client = http.Client("registry.example", Config())
    with pytest.raises(StoreError, match="has no TLS"):
        client.resolve("http://evil.example/up")
    assert client.resolve("http://registry.example/up") == "https://registry.example/up"
    assert server.requests == []


def test_blob_of_a_repository_of_the_same_registry_is_mounted(serve: Serve) -> None:
    server = serve(Uploads(mount=True))
    server.repository().copy_from(server.repository("other/app"), BLOB)
    assert [request.method for request in server.requests] == ["HEAD", "POST"]
    assert server.requests[1].query == {"mount": [DIGEST], "from": ["other/app"]}


def test_blob_that_cannot_be_mounted_is_uploaded(serve: Serve) -> None:
    uploads = Uploads()

    def answer(request: Request) -> Answer:
        if request.method == "GET" and "/other/app/blobs/" in request.path:
            return ranged(request)
        return uploads(request)

    server = serve(answer)
    server.repository().copy_from(server.repository("other/app"), BLOB)
    assert uploads.blobs == {DIGEST: BODY}
    assert len(server.asked("POST")) == 1


def test_large_blob_is_copied_in_parts(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PART_BYTES", 3000)
    monkeypatch.setattr(registry, "_PIECE", 1000)
    uploads = Uploads()
    target = serve(uploads)
    source = serve(ranged)
    target.repository().copy_from(source.repository(), BLOB)
    assert uploads.blobs == {DIGEST: BODY}
    assert len(target.asked("PATCH")) == 4


def bearer(realm: str, token: str = "t1") -> Callable[[Request], Answer]:
    def answer(request: Request) -> Answer:
        if request.path.startswith("/token"):
            return Answer(200, json.dumps({"token": token, "expires_in": 300}).encode())
        if request.headers.get("authorization") != f"Bearer {token}":
            challenge = f'Bearer realm="http://{realm}/token",service="reg",scope="x"'
            return Answer(401, headers={"WWW-Authenticate": challenge})
        return Answer(200, MANIFEST)

    return answer


def test_token_is_fetched_once_with_the_credentials(serve: Serve, tmp_path: Path) -> None:
    server = serve(lambda request: Answer(500))
    server.answer = bearer(server.host)
    log_in(tmp_path, server.host)
    repository = server.repository()
    repository.manifest("x")
    repository.manifest("y")
    tokens = [request for request in server.requests if request.path.startswith("/token")]
    assert len(tokens) == 1
    assert tokens[0].query == {"service": ["reg"], "scope": ["repository:team/web:pull"]}
    assert tokens[0].headers["authorization"] == "Basic " + base64.b64encode(b"ann:secret").decode()


def test_token_without_credentials_is_asked_for_anonymously(serve: Serve) -> None:
    server = serve(lambda request: Answer(500))
    server.answer = bearer(server.host)
    assert server.repository().manifest("x")[1] == MANIFEST


def test_expired_token_is_replaced(serve: Serve) -> None:
    server = serve(lambda request: Answer(500))
    server.answer = bearer(server.host)
    repository = server.repository()
    repository.manifest("x")
    server.answer = bearer(server.host, "t2")
    assert repository.manifest("x")[1] == MANIFEST


def test_identity_token_is_exchanged(serve: Serve, tmp_path: Path) -> None:
    server = serve(lambda request: Answer(500))
    server.answer = bearer(server.host)
    (tmp_path / "docker").mkdir()
    config = {"auths": {server.host: {"identitytoken": "refresh-me"}}}
    (tmp_path / "docker" / "config.json").write_text(json.dumps(config))
    assert server.repository().manifest("x")[1] == MANIFEST
    body = parse_qs(server.asked("POST")[0].body.decode())
    assert (body["grant_type"], body["refresh_token"]) == (["refresh_token"], ["refresh-me"])


def test_wrong_password_is_told(serve: Serve, tmp_path: Path) -> None:
    server = serve(lambda request: Answer(401, headers={"WWW-Authenticate": 'Basic realm="r"'}))
    log_in(tmp_path, server.host)
    with pytest.raises(AuthError, match="denies access") as raised:
        server.repository().manifest("x")
    assert "credentials" in raised.value.hint
    assert len(server.requests) == 2


def test_missing_login_is_told(serve: Serve) -> None:
    server = serve(lambda request: Answer(401, headers={"WWW-Authenticate": 'Basic realm="r"'}))
    with pytest.raises(AuthError, match="denies access") as raised:
        server.repository().manifest("x")
    assert f"login {server.host}" in raised.value.hint


def test_token_server_that_refuses_is_told(serve: Serve) -> None:
    server = serve(lambda request: Answer(500))

    def answer(request: Request) -> Answer:
        if request.path.startswith("/token"):
            return Answer(401)
        return Answer(401, headers={"WWW-Authenticate": f'Bearer realm="http://{server.host}/token"'})

    server.answer = answer
    with pytest.raises(AuthError, match="denies access to team/web"):
        server.repository().manifest("x")


def test_credentials_are_not_sent_to_a_realm_without_tls() -> None:
    client = http.Client("registry.example", Config())
    with pytest.raises(AuthError, match="without TLS"):
        client._token({"realm": "http://registry.example/token"}, None, http.Scope("web", "pull"))


def test_tags_are_read_page_by_page_without_the_referrers_tags(serve: Serve) -> None:
    def answer(request: Request) -> Answer:
        if "last" in request.query:
            return Answer(200, b'{"tags":["c"]}')
        link = {"Link": '</v2/team/web/tags/list?n=1000&last=b>; rel="next"'}
        return Answer(200, json.dumps({"tags": ["a", "sha256-" + "0" * 64, "b"]}).encode(), link)

    assert serve(answer).repository().tags() == ["a", "b", "c"]


def test_repository_that_does_not_exist_has_no_tags(serve: Serve) -> None:
    server = serve(lambda request: Answer(404, error_body("NAME_UNKNOWN", "unknown")))
    assert server.repository().tags() == []


def test_referrers_api_is_used_where_there_is_one(serve: Serve) -> None:
    entry = {**Descriptor(IMAGE_MANIFEST, DIGEST, 3).to_json(), "artifactType": "a/b"}
    server = serve(lambda request: Answer(200, json.dumps({"manifests": [entry]}).encode()))
    found = server.repository().referrers(DIGEST)
    assert [(d.digest, d.artifact_type) for d in found] == [(DIGEST, "a/b")]
    assert server.requests[0].path == f"/v2/team/web/referrers/{DIGEST}"


def test_manifest_with_a_subject_is_not_noted_twice_where_the_registry_does_it(serve: Serve) -> None:
    server = serve(lambda request: Answer(201, headers={"OCI-Subject": DIGEST}))
    subject = Descriptor(IMAGE_MANIFEST, DIGEST, 3).to_json()
    body = json.dumps({"schemaVersion": 2, "subject": subject}).encode()
    server.repository().put_manifest(IMAGE_MANIFEST, body, "web")
    assert [request.method for request in server.requests] == ["PUT"]


def test_deleting_is_told_to_be_off(serve: Serve) -> None:
    def answer(request: Request) -> Answer:
        if request.method == "DELETE":
            return Answer(405, error_body("UNSUPPORTED", "The operation is unsupported."))
        return Answer(200, MANIFEST if "manifests" in request.path else b'{"tags":["x"]}')

    with pytest.raises(StoreError, match="answers 405 to the request to delete x") as raised:
        serve(answer).repository().delete("x")
    assert "REGISTRY_STORAGE_DELETE_ENABLED" in raised.value.hint
