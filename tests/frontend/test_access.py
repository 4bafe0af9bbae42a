"""Who may come in, and what the door does with those who send no proper request."""

import http.client
import re
import shutil
import socket
import ssl
import subprocess
import urllib.request

import pytest
from frontend_harness import Server, strict_json

from srt.frontend import http_server, services

KEYS = {"api_key": "user,friend", "admin_api_key": "root", "cors_origins": "https://a.example/, https://b.example"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), **KEYS, max_body_size=5000) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), cors_origins="*") as running:
        yield running


@pytest.fixture(scope="module")
def keyless_server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), cors_origins="https://a.example") as running:
        yield running


def status(server, method, path, key=None, header="Authorization"):
    headers = {} if key is None else {header: f"Bearer {key}" if header == "Authorization" else key}
    return server.request(method, path, b"{}" if method == "POST" else None, headers)[0]


@pytest.mark.parametrize(
    ("key", "expected"), [(None, 401), ("wrong", 401), ("user", 200), ("friend", 200), ("root", 200), (" user", 200)]
)
def test_keys_of_users(server, key, expected):
    assert status(server, "GET", "/v1/models", key) == expected
    assert status(server, "GET", "/v1/models", key, "x-api-key") == expected
    assert status(server, "GET", "/health", key) == 200


@pytest.mark.parametrize(("key", "expected"), [(None, 401), ("user", 401), ("root", 200)])
def test_the_administrators_key(server, key, expected):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    code, _, raw = server.request("POST", "/flush_cache", b"", headers)
    assert code == expected
    assert (b"--admin-api-key" in raw) == (key == "user")


def test_secrets_are_not_told(server):
    raw = server.request("GET", "/server_info", headers={"Authorization": "Bearer user"})[2]
    assert b"friend" not in raw
    assert b"root" not in raw


@pytest.mark.parametrize("origin", ["https://a.example", "https://evil.example"])
def test_pages_of_some_origins(server, origin):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-y"}
    code, answer, _ = server.request("OPTIONS", "/v1/completions", headers=headers)
    allowed = {"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Headers": "x-y"}
    assert code == 204
    for name, value in allowed.items():
        assert answer[name] == (value if "a.example" in origin else None)
    _, answer, _ = server.request("GET", "/health", headers={"Origin": origin})
    assert answer["Access-Control-Allow-Origin"] == (origin if "a.example" in origin else None)
    assert answer["Vary"] == "Origin"


def test_pages_of_all_origins_also_read_streams_and_errors(open_server):
    page = {"Origin": "https://x.example"}
    for body, code in (({"prompt": "a", "stream": True}, 200), ({}, 400)):
        got, headers, _ = open_server.request("POST", "/v1/completions", body, page)
        assert (got, headers["Access-Control-Allow-Origin"]) == (code, "*")
    assert open_server.request("GET", "/health")[1]["Access-Control-Allow-Origin"] is None


OTHERS = [
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},  # without a script
    {"Origin": "http://evil.example"},  # to a host without TLS
    {"Origin": "null"},
    {"Origin": "http://[nonsense"},
]
OWN = [
    {},
    {"Origin": "https://behind.a.proxy", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "http://127.0.0.1:{port}"},
    {"Origin": "app://of-its-own"},
    {"Origin": "https://a.example", "Sec-Fetch-Site": "cross-site"},
]


@pytest.mark.parametrize(("headers", "others"), [*((one, True) for one in OTHERS), *((one, False) for one in OWN)])
def test_pages_of_other_origins_send_nothing_where_no_key_is_asked_for(keyless_server, headers, others):
    """A browser would send it, though the page could not read the answer."""
    headers = {name: value.replace("{port}", str(keyless_server.port)) for name, value in headers.items()}
    for method, path, body in (("POST", "/flush_cache", None), ("POST", "/v1/completions", {"prompt": "a"})):
        code, _, raw = keyless_server.request(method, path, body, headers)
        assert code == (403 if others else 200)
        assert not others or strict_json(raw)["error"]["code"] == "origin_not_allowed"
    assert keyless_server.request("GET", "/v1/models", headers=headers)[0] == 200
    if "Sec-Fetch-Site" in headers:
        assert keyless_server.request("GET", "/flush_cache", headers=headers)[0] == (403 if others else 200)


def test_what_asks_for_a_key_asks_for_no_origin(server):
    headers = {"Authorization": "Bearer root", "Origin": "http://evil.example"}
    assert server.request("POST", "/flush_cache", headers=headers)[0] == 200


def test_the_description_is_open(server):
    assert [status(server, "GET", path) for path in ("/docs", "/openapi.json")] == [200, 200]


def test_a_body_above_the_limit(server):
    key = {"Authorization": "Bearer user"}
    code, _, raw = server.request("POST", "/v1/completions", {"prompt": "a" * 6000}, key)
    assert (code, strict_json(raw)["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "raw", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_http_is_answered_in_json(open_server, raw):
    with socket.create_connection(("127.0.0.1", open_server.port), timeout=60) as sock:
        sock.sendall(raw)
        head, _, body = receive_all(sock).partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    error = strict_json(body)["error"]
    assert error["code"] == "malformed_http"
    assert re.search(r"\w\.$", error["message"])


def test_a_body_that_does_not_come(open_server, monkeypatch):
    monkeypatch.setattr(services, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", open_server.port), timeout=60) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert sock.recv(100).startswith(b"HTTP/1.1 408")


def test_a_body_that_goes_on_as_nothing(open_server, caplog):
    with socket.create_connection(("127.0.0.1", open_server.port), timeout=60) as sock:
        sock.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        )
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # so somebody waits for the body
        sock.sendall(b"1\r\n{\r\nnone\r\n")
        answer = receive_all(sock)
    assert answer.split()[1] == b"400", "and not 408, once it has been waited for"
    assert b"is not encoded as its headers say" in answer
    assert not caplog.records


def test_a_client_that_waits_until_it_may_send_its_body(open_server):
    body = b'{"text": "ab"}'
    with socket.create_connection(("127.0.0.1", open_server.port), timeout=60) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\n")
        sock.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert receive_all(sock).startswith(b"HTTP/1.1 200")
    with socket.create_connection(("127.0.0.1", open_server.port), timeout=60) as sock:
        sock.sendall(b"POST /generate HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        sock.sendall(body[:5])
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):  # it would take that for the answer
            sock.recv(100)
        sock.settimeout(60)
        sock.sendall(body[5:])
        assert receive_all(sock).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize(
    ("version", "wish", "told", "stays"),
    [("1.1", None, None, True), ("1.1", "close", "close", False),
     ("1.0", None, None, False), ("1.0", "keep-alive", "keep-alive", True)],
)  # fmt: skip
def test_how_long_a_connection_stays(open_server, version, wish, told, stays):
    request = f"GET /v1/models HTTP/{version}\r\nHost: x\r\n" + (f"Connection: {wish}\r\n" if wish else "") + "\r\n"
    with socket.create_connection(("127.0.0.1", open_server.port), timeout=60) as sock:
        for _ in range(2 if stays else 1):
            sock.sendall(request.encode())
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            assert strict_json(answer.read())["data"]
            assert (answer.version, answer.headers["Connection"]) == (10 if version == "1.0" else 11, told)
        if not stays:
            assert receive_all(sock) == b""


def test_an_answer_to_head_has_no_body(server):
    for key in ({}, {"Authorization": "Bearer root"}):
        told, headers, body = server.request("HEAD", "/v1/models", headers=key)
        code, _, shown = server.request("GET", "/v1/models", headers=key)
        assert (told, headers["Content-Type"], int(headers["Content-Length"])) == (code, "application/json", len(shown))
        assert body == b""


def test_a_head_that_does_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.2)
    with Server(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHos")
        assert receive_all(sock) == b""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes no certificate without openssl")
def test_https(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    folder = tmp_path / "s"
    folder.mkdir()
    with Server(folder, ssl_certfile=str(cert), ssl_keyfile=str(key)) as server:
        context = ssl.create_default_context(cafile=cert)
        request = urllib.request.Request(
            f"https://localhost:{server.port}/v1/completions", b'{"prompt": "ab", "max_tokens": 3, "stream": true}'
        )
        with urllib.request.urlopen(request, context=context, timeout=60) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")


def receive_all(sock):
    received = b""
    while data := sock.recv(65536):
        received += data
    return received
