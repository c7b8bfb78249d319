"""One registry over HTTP: connections, authentication, retries, and errors in words.

Distribution-spec over urllib3. Every request says what it is for (`what`), so that its failure can be
told to a person; nothing here knows blobs or manifests.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import random
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack
from urllib.parse import urlencode, urljoin, urlsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    MaxRetryError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
    SSLError,
)

from base.config import Config
from oci import credentials
from oci.errors import AuthError, StoreError
from oci.store import Buffer, worker_count

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 10.0
_DATA_TIMEOUT_S = 20.0
_ATTEMPTS = 4
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 10.0
_REDIRECTS = 5
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_MAX_ANSWER = 1 << 20
_SLICE_BYTES = 128 * 1024
"""What must go through within the connect timeout: a line of 26 kB/s is still served."""
_TOKEN_SLACK_S = 10.0
DOCKER_HUB = "docker.io"
_HUB_HOST = "registry-1.docker.io"
_CERTS = (Path("/etc/docker/certs.d"), Path("/etc/containerd/certs.d"))

Body = Sequence[Buffer]
"""The parts of a request's body, kept in memory so that it can be sent again."""


class StatusError(StoreError):
    """The registry answered with a status that the request did not expect."""

    def __init__(self, status: int, message: str, *, hint: str = "", details: str = "") -> None:
        super().__init__(message, hint=hint, details=details)
        self.status = status


class ConnectionFailed(StoreError):
    """The connection broke, or never was; `transient` when another attempt may go through."""

    def __init__(self, message: str, *, hint: str, details: str, transient: bool) -> None:
        super().__init__(message, hint=hint, details=details)
        self.transient = transient


@dataclass(frozen=True)
class Scope:
    """What a request needs to be allowed: actions on a repository, and pulling from others."""

    repository: str
    actions: str
    pull_from: str = ""

    def values(self) -> list[str]:
        values = [f"repository:{self.repository}:{self.actions}"]
        return values + ([f"repository:{self.pull_from}:pull"] if self.pull_from else [])


class Options(TypedDict, total=False):
    """What `Client.request` takes besides."""

    expect: Sequence[int]
    headers: Mapping[str, str] | None
    body: Body
    attempts: int


class Client:
    """Requests to the registry `registry` (host[:port]); used from many threads."""

    def __init__(self, registry: str, config: Config) -> None:
        self.registry = registry
        host = _HUB_HOST if registry == DOCKER_HUB else registry
        self.plain = is_plain(registry, config)
        self.url = f"{'http' if self.plain else 'https'}://{host}"
        self._pool = _pool(self.url, registry)
        self._lock = threading.Lock()
        self._authorization: dict[Scope, tuple[str, float]] = {}
        """For each scope the header's value, and until when it is good."""

    def request(
        self,
        method: str,
        url: str,
        scope: Scope,
        what: str,
        *,
        expect: Sequence[int] = (200,),
        headers: Mapping[str, str] | None = None,
        body: Body = (),
        attempts: int = _ATTEMPTS,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request until it is answered with one of `expect`; the caller reads and releases.

        Raises `AuthError`, `StatusError` for any other answer, `ConnectionFailed`.
        """
        for attempt in range(1, attempts + 1):
            try:
                return self._authorized(method, urljoin(self.url, url), scope, what, expect, headers, body)
            except ConnectionFailed as error:
                if not error.transient or attempt == attempts:
                    raise
                delay = _delay(attempt)
            except _Transient as error:
                if attempt == attempts:
                    raise error.cause from None
                delay = max(_delay(attempt), error.retry_after_s)
            time.sleep(delay)
        raise AssertionError("attempts must be positive")

    def fetch(self, method: str, url: str, scope: Scope, what: str, **options: Unpack[Options]) -> Answer:
        """A request whose answer is small: read as a whole."""
        response = self.request(method, url, scope, what, **options)
        limit = _MAX_ANSWER * 8
        try:
            with self.translated(what):
                body = b"" if method == "HEAD" else _read_at_most(response, limit + 1)
        finally:
            finish(response)
        if len(body) > limit:
            raise StoreError(f"{self.registry} answers with more than {limit} bytes: {what}")
        return Answer(response.status, {key.lower(): value for key, value in response.headers.items()}, body)

    def resolve(self, location: str) -> str:
        """The absolute form of a location the registry gave; raises `StoreError` where it has no TLS."""
        url = urlsplit(urljoin(self.url, location))
        own = urlsplit(self.url)
        if url.netloc == own.netloc:
            # A proxy before the registry may end TLS, and the registry not know.
            url = url._replace(scheme=own.scheme)
        if url.scheme not in ("https", own.scheme):
            raise StoreError(f"{self.registry} sends us to {url.geturl()}, which has no TLS")
        return url.geturl()

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Turns urllib3's errors into ours."""
        try:
            yield
        except (HTTPError, OSError) as error:
            raise self._failure(error, what) from error

    def _authorized(
        self,
        method: str,
        url: str,
        scope: Scope,
        what: str,
        expect: Sequence[int],
        headers: Mapping[str, str] | None,
        body: Body,
    ) -> urllib3.BaseHTTPResponse:
        response = self._send(method, url, headers, body, self._known_authorization(url, scope), what)
        if response.status == 401:
            challenges = response.headers.getlist("www-authenticate")
            finish(response)
            self._authenticate(challenges, scope)
            response = self._send(method, url, headers, body, self._known_authorization(url, scope), what)
        for _ in range(_REDIRECTS):
            target = response.headers.get("location")
            if (
                response.status not in (301, 302, 303, 307, 308)
                or not target
                or method not in ("GET", "HEAD")
            ):
                break
            finish(response)
            url = self.resolve(urljoin(url, target))
            response = self._send(method, url, headers, body, self._known_authorization(url, scope), what)
        if response.status in expect:
            return response
        raise self._refusal(response, scope, what)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: Body,
        authorization: str,
        what: str,
    ) -> urllib3.BaseHTTPResponse:
        all_headers = {"User-Agent": "cedana", "Accept-Encoding": "identity", **(headers or {})}
        if authorization:
            all_headers["Authorization"] = authorization
        if method in ("POST", "PUT", "PATCH"):
            all_headers["Content-Length"] = str(sum(map(len, body)))
        read_timeout = _DATA_TIMEOUT_S if method in ("PUT", "PATCH") else _ANSWER_TIMEOUT_S
        with self.translated(what):
            return self._pool.request(
                method,
                url,
                headers=all_headers,
                body=_slices(body) if body else None,  # type: ignore[arg-type]
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=read_timeout),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )

    def _known_authorization(self, url: str, scope: Scope) -> str:
        """The header for this scope; none for another host than the registry's own."""
        if urlsplit(url)[:2] != urlsplit(self.url)[:2]:
            return ""
        with self._lock:
            value, until = self._authorization.get(scope, ("", 0.0))
        return value if time.monotonic() < until else ""

    def _authenticate(self, challenges: Sequence[str], scope: Scope) -> None:
        found = credentials.find(self.registry)
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            parameters = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            if scheme.lower() == "bearer" and "realm" in parameters:
                value = self._token(parameters, found, scope)
                break
            if scheme.lower() == "basic" and found is not None:
                value = (found.basic(), float("inf"))
                break
        else:
            raise self._denied(401, scope, "", found is not None)
        with self._lock:
            self._authorization[scope] = value

    def _token(
        self, challenge: Mapping[str, str], found: credentials.Credentials | None, scope: Scope
    ) -> tuple[str, float]:
        """A bearer token of the realm the registry names (distribution-spec, token authentication)."""
        realm = challenge["realm"]
        if urlsplit(realm).scheme not in ("https", "http" if self.plain else "https"):
            raise AuthError(f"{self.registry} wants credentials sent without TLS to {realm}")
        fields = [("service", challenge.get("service", "")), *(("scope", value) for value in scope.values())]
        what = f"get a token from {realm}"
        headers: dict[str, str] = {}
        if found is not None and found.identity_token:
            fields += [("grant_type", "refresh_token"), ("refresh_token", found.identity_token)]
            fields += [("client_id", "cedana")]
            body = [urlencode(fields).encode()]
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            response = self._send("POST", realm, headers, body, "", what)
        else:
            query = f"{'&' if '?' in realm else '?'}{urlencode(fields)}"
            basic = found.basic() if found is not None else ""
            response = self._send("GET", realm + query, headers, (), basic, what)
        try:
            if response.status in (400, 401, 403):
                raise self._denied(response.status, scope, "", found is not None)
            if response.status != 200:
                raise self._refusal(response, scope, what)
            with self.translated(what):
                answer = json.loads(_read_at_most(response, _MAX_ANSWER))
            token = answer.get("token") or answer["access_token"]
            lifetime = float(answer.get("expires_in") or 60)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AuthError(f"{realm} gave no proper token for {self.registry}") from error
        finally:
            finish(response)
        return f"Bearer {token}", time.monotonic() + max(lifetime - _TOKEN_SLACK_S, lifetime / 2)

    def _refusal(self, response: urllib3.BaseHTTPResponse, scope: Scope, what: str) -> Exception:
        """The error for an unexpected answer; releases it."""
        try:
            said = _message(_read_at_most(response, _MAX_ANSWER))
        except (HTTPError, OSError):
            said = ""
        finally:
            finish(response)
        status = response.status
        if status in (401, 403):
            return self._denied(status, scope, said, credentials.find(self.registry) is not None)
        hints = {
            404: "check the name; `cedana ls REGISTRY/REPOSITORY` lists what is there",
            405: "the registry does not allow this (deleting is often off: "
            "REGISTRY_STORAGE_DELETE_ENABLED=true turns it on in docker-registry)",
            413: "the registry, or a proxy before it, limits the size of uploads; raise that limit",
            429: "the registry limits how often it may be asked; wait, or log in",
            507: "the registry's disk is full",
        }
        error = StatusError(
            status,
            f"{self.registry} answers {status} to the request to {what}",
            hint=hints.get(status, "see the registry's own log" if status >= 500 else ""),
            details=said,
        )
        if status in _TRANSIENT:
            return _Transient(error, _retry_after_s(response.headers.get("retry-after")))
        return error

    def _denied(self, status: int, scope: Scope, said: str, logged_in: bool) -> AuthError:
        if logged_in:
            hint = f"the credentials for {self.registry} lack the right ({scope.actions}), or have expired"
        else:
            hint = f"log in first: `nerdctl login {self.registry}` (or docker, podman)"
        return AuthError(
            f"{self.registry} denies access to {scope.repository} ({status})", hint=hint, details=said
        )

    def _failure(self, error: Exception, what: str) -> ConnectionFailed:
        cause: BaseException = error.reason if isinstance(error, MaxRetryError) and error.reason else error
        transient, hint = False, "check the address, and that the registry runs"
        match cause:
            case ConnectTimeoutError() if not isinstance(cause, NewConnectionError):
                words = f"does not answer (waited {_CONNECT_TIMEOUT_S:.0f} s for a connection)"
            case NameResolutionError():
                words = "has a name that cannot be resolved"
            case NewConnectionError():
                words = "refuses connections" if "refused" in str(cause) else "cannot be reached"
            case ReadTimeoutError() | TimeoutError() | ProtocolError(args=(_, TimeoutError())):
                words, hint = "stopped answering", "check the registry's log and load"
            case SSLError():
                words = "cannot be spoken to by TLS"
                hint = (
                    "does it speak plain HTTP? Then list it in plain_http of /etc/cedana/config.toml. "
                    f"Its CA certificate goes into /etc/docker/certs.d/{self.registry}/ca.crt"
                )
            case _:
                words, transient = "broke the connection", True
        return ConnectionFailed(
            f"the registry {self.registry} {words}: could not {what}",
            hint=hint,
            details=str(cause),
            transient=transient,
        )


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class _Transient(Exception):
    """An answer that another attempt may change."""

    def __init__(self, cause: StatusError, retry_after_s: float) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.retry_after_s = retry_after_s


def is_plain(registry: str, config: Config) -> bool:
    """Whether the registry is spoken to without TLS: loopback addresses, and those configured so."""
    host, _, port = registry.rpartition(":") if re.search(r":\d+$", registry) else (registry, "", "")
    if registry in config.plain_http or host in config.plain_http:
        return True
    if port == "443":
        return False
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _pool(url: str, registry: str) -> urllib3.PoolManager:
    parts = urlsplit(url)
    options: dict[str, object] = {"maxsize": 2 * worker_count()}
    if parts.scheme == "https":
        context = ssl.create_default_context()
        for directory in _CERTS:
            for path in sorted((directory / registry).glob("*.crt")):
                context.load_verify_locations(path)
        options["ssl_context"] = context
    proxy = urllib.request.getproxies().get(parts.scheme)
    host = parts.hostname or ""
    if proxy and not is_plain(host, Config()) and not urllib.request.proxy_bypass(host):
        return urllib3.ProxyManager(proxy if "://" in proxy else f"http://{proxy}", **options)  # type: ignore[arg-type]
    return urllib3.PoolManager(**options)  # type: ignore[arg-type]


def _slices(body: Body) -> Iterator[Buffer]:
    for buffer in body:
        view = memoryview(buffer)
        for start in range(0, len(view), _SLICE_BYTES):
            yield view[start : start + _SLICE_BYTES]


def finish(response: urllib3.BaseHTTPResponse) -> None:
    """Give the connection back if the answer was read to its end, else close it."""
    with contextlib.suppress(HTTPError, OSError):
        left = response.length_remaining
        if left is None or left > _MAX_ANSWER:
            response.close()
        else:
            response.drain_conn()
    response.release_conn()


def _read_at_most(response: urllib3.BaseHTTPResponse, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size < limit and (part := response.read(min(limit - size, 1 << 16))):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _message(body: bytes) -> str:
    """What a registry says in its error document, in one line."""
    try:
        errors = json.loads(body)["errors"]
        return "; ".join(f"{error.get('code', '')}: {error.get('message', '')}" for error in errors)[:300]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return body.decode(errors="replace").strip()[:200]


def _delay(attempt: int) -> float:
    return float(_FIRST_DELAY_S * 2 ** (attempt - 1) * random.uniform(0.8, 1.2))


def _retry_after_s(value: str | None) -> float:
    return min(float(value), _MAX_DELAY_S) if value and value.isascii() and value.isdigit() else 0.0
