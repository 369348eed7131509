"""The gate before Flower's routes: a SuperLink and a SuperNode, real and over TLS, and outsiders of every kind."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

import httpx  # noqa: E402 - comes with flwr

from fedcc.flower.fleet import ROUTES  # noqa: E402
from fedcc.flower.gate import superlink_command, supernode_command  # noqa: E402
from fedcc.flower.keys import sign_app  # noqa: E402

BIN = Path(sys.executable).parent
APP = """
import time
from flwr.app import Message, RecordDict, ConfigRecord, ArrayRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
import numpy as np

server = ServerApp()
client = ClientApp()

@server.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    sent = np.arange(context.run_config["numbers"], dtype=np.float32)
    content = RecordDict({"array": ArrayRecord([sent])})
    begun = time.perf_counter()
    budget = f"1:{4 * len(sent) + 10000}"
    message = Message(content=content, message_type="train", dst_node_id=nodes[0], ttl=300.0, group_id=budget)
    ids = list(grid.push_messages([message]))
    replies = []
    while not replies:
        time.sleep(0.1)
        replies = list(grid.pull_messages(ids))
    taken = time.perf_counter() - begun
    if replies[0].has_error():
        print("TROUBLE", replies[0].error.code, replies[0].error.reason, flush=True)
    else:
        came = replies[0].content["array"].to_numpy_ndarrays()[0]
        print("DOUBLED", bool((came == 2 * sent).all()), len(came), f"{taken:.2f} s", flush=True)

@client.train()
def train(message, context):
    array = message.content["array"].to_numpy_ndarrays()[0]
    return Message(content=RecordDict({"array": ArrayRecord([2 * array])}), reply_to=message)
"""
PROJECT = """
[project]
name = "doubling"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "doubling:server"
clientapp = "doubling:client"
[tool.flwr.app.config]
numbers = 1000
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certificates(folder: Path) -> None:
    """A CA and, signed by it, a certificate for this machine."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    folder.mkdir()
    keys = {who: ec.generate_private_key(ec.SECP256R1()) for who in ("ca", "server")}
    now = datetime.now(UTC)
    for who, key in keys.items():
        made = x509.CertificateBuilder(name("ca"), name(who), key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(ca=who == "ca", path_length=None), critical=True)
        if who == "server":
            names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        (folder / f"{who}.crt").write_bytes(made.sign(keys["ca"], SHA256()).public_bytes(Encoding.PEM))
    pem = keys["server"].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.key").write_bytes(pem)


def key_pair(path: Path) -> Path:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return path


@dataclass
class Federation:
    """A SuperLink behind its gate, a registered SuperNode, and what an operator and outsiders do."""

    folder: Path
    public: int
    private: int
    env: dict[str, str]
    started: list[subprocess.Popen[bytes]]

    @property
    def ca(self) -> str:
        return str(self.folder / "tls" / "ca.crt")

    @property
    def tls(self) -> list[str]:
        """The certificate, which the SuperLink and the SuperNodes share here."""
        files = (("ca-certfile", "ca.crt"), ("certfile", "server.crt"), ("keyfile", "server.key"))
        return [f"--ssl-{option}={self.folder / 'tls' / file}" for option, file in files]

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True)
        self.started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def node(self, name: str, key: Path, *more: str, ca: str | None = None) -> subprocess.Popen[bytes]:
        own = free_port()
        command = supernode_command("--auth-supernode-private-key", str(key))
        where = ["--root-certificates", ca or self.ca, "--superlink", f"127.0.0.1:{self.public}"]
        patience = ["--max-retries", "1", "--host", "127.0.0.1", "--port", str(own)]
        process = self.start(name, *command, *where, *patience, *self.tls, *more)
        self.ports = {**getattr(self, "ports", {}), name: own}
        return process

    def flwr(self, *command: str, port: int | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Flower's command line, at the private port unless said otherwise."""
        home = self.folder / f"home-{port or self.private}"
        home.mkdir(exist_ok=True)
        text = f'[superlink.it]\naddress = "127.0.0.1:{port or self.private}"\nroot-certificates = "{self.ca}"\n'
        (home / "config.toml").write_text(text)
        env = {**self.env, "FLWR_HOME": str(home)}
        return subprocess.run(
            [str(BIN / "flwr"), *command], env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def post(self, path: str, port: int | None = None, content: bytes = b"", **options: Any) -> httpx.Response:
        headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
        verify = ssl.create_default_context(cafile=self.ca)
        url = f"https://127.0.0.1:{port or self.public}{path}"
        return httpx.post(url, content=content, headers=headers | options.pop("headers", {}), verify=verify, **options)


def waited(what: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.2)
    return False


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("gate")
    certificates(folder / "tls")
    (folder / "doubling.py").write_text(APP)
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(PROJECT)
    env = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    made = Federation(folder, free_port(), free_port(), env, [])
    try:
        trusted, signature = sign_app(folder / "app")
        (folder / "trusted.yaml").write_text(trusted)
        (folder / "signature.json").write_text(signature)
        gate = superlink_command(f"127.0.0.1:{made.public}", signature=folder / "signature.json")
        where = ["--host", "127.0.0.1", "--port", str(made.private)]
        more = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        made.start("superlink", *gate, *where, *made.tls, *more)
        assert waited(lambda: reachable(made.public)), made.log("superlink")
        key = key_pair(folder / "node")
        registered = made.flwr("supernode", "register", str(key.with_suffix(".pub")), "it")
        assert registered.returncode == 0, registered.stdout + registered.stderr
        made.node("node", key, "--trusted-entities", str(folder / "trusted.yaml"))
        assert waited(lambda: "activate-node" in made.log("superlink")), made.log("node")
        yield made
    finally:
        for process in reversed(made.started):
            if process.poll() is None:
                process.terminate()
        for process in made.started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def ran(federation: Federation, numbers: int, name: str = "app") -> str:
    """What a run of the app printed."""
    app = str(federation.folder / name)
    done = federation.flwr("run", app, "it", "--stream", "-c", f"numbers={numbers}")
    return done.stdout + done.stderr


def test_a_run_goes_through_the_gate(federation: Federation) -> None:
    assert "DOUBLED True 1000 " in (said := ran(federation, 1000)), said


def test_large_arrays_go_through_the_gate(federation: Federation) -> None:
    assert "DOUBLED True 5000000 " in (said := ran(federation, 5_000_000)), said  # 20 MB each way


def test_a_site_runs_no_other_app(federation: Federation) -> None:
    """Not even for the operator, or for whoever took over the server."""
    other = federation.folder / "other-app"
    other.mkdir()
    (other / "pyproject.toml").write_text(PROJECT.replace("1.0.0", "1.0.1"))
    said = ran(federation, 1000, "other-app")
    assert "TROUBLE" in said, said
    assert "DOUBLED" not in said
    assert "FAB verification failed" in federation.log("node")


# -- those who have the CA's certificate and nothing else


def test_no_route_but_the_fleets_is_public(federation: Federation) -> None:
    from flwr.supercore.routers.runtime.router import router as runtime
    from flwr.superlink.routers.control.router import router as control
    from flwr.superlink.routers.fleet.router import router as fleet

    every = {route.path for router in (control, runtime, fleet) for route in router.routes}
    assert {"/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"} <= every
    assert every >= set(ROUTES)  # none of those that are open has been renamed
    odd = ("/v1/runtime/responses", "/docs", "/openapi.json", "/health", "/", "//v1/control/start-run",
           "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "/V1/fleet/get-run",
           "/v1/fleet/get-run/")  # fmt: skip
    for path in (*sorted(every - set(ROUTES)), *odd):
        answer = federation.post(path)
        assert (answer.status_code, "only routes of the fleet" in answer.text) == (403, True), path
    assert (
        httpx.get(
            f"https://127.0.0.1:{federation.public}/v1/fleet/get-run",
            verify=ssl.create_default_context(cafile=federation.ca),
        ).status_code
        == 403
    )


def test_the_fleets_routes_ask_for_a_key(federation: Federation) -> None:
    for path in sorted(ROUTES):
        answer = federation.post(path)
        assert answer.status_code in (401, 412), path
        assert "signed with the key of a registered client" in answer.text


def test_who_may_not_start_a_run_or_register_a_client(federation: Federation) -> None:
    key = key_pair(federation.folder / "intruder")
    started = federation.flwr("run", str(federation.folder / "app"), "it", port=federation.public)
    registered = federation.flwr("supernode", "register", f"{key}.pub", "it", port=federation.public)
    listed = federation.flwr("supernode", "list", "it", port=federation.public)
    for tried in (started, registered, listed):
        assert tried.returncode != 0
        assert "403" in tried.stdout + tried.stderr, tried.stdout + tried.stderr
    process = federation.node("intruder", key)  # it was not registered by the way either
    assert waited(lambda: process.poll() is not None)
    assert process.returncode != 0
    assert "412 Precondition Failed" in federation.log("intruder"), federation.log("intruder")


def test_a_request_that_is_too_large_or_says_no_length_is_not_read(federation: Federation) -> None:
    with socket.create_connection(("127.0.0.1", federation.public)) as raw:
        context = ssl.create_default_context(cafile=federation.ca)
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
            head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: {10**12}\r\n\r\n"
            secure.sendall(head.encode())
            assert secure.recv(4096).startswith(b"HTTP/1.1 413")
    url = f"https://127.0.0.1:{federation.public}/v1/fleet/push-object"
    chunks = httpx.post(url, content=iter([b"a", b"b"]), verify=ssl.create_default_context(cafile=federation.ca))
    assert chunks.status_code == 411


# -- those who have not even that


def test_without_the_cas_certificate_nobody_connects(federation: Federation) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.post(f"https://127.0.0.1:{federation.public}/v1/fleet/get-run")
    with pytest.raises(httpx.HTTPError):  # no TLS at all
        httpx.post(f"http://127.0.0.1:{federation.public}/v1/fleet/get-run")


def test_a_client_refuses_a_server_of_another_ca(federation: Federation) -> None:
    certificates(federation.folder / "other")
    other = str(federation.folder / "other" / "ca.crt")
    process = federation.node("mistaken", federation.folder / "node", ca=other)
    assert waited(lambda: process.poll() is not None)
    assert process.returncode != 0
    assert "certificate verify failed" in federation.log("mistaken").lower(), federation.log("mistaken")


# -- other users of the same machine


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_other_users_of_the_machine_are_refused(federation: Federation) -> None:
    """At the server's private port and at the client's: with and without closing before the answer."""
    program = (
        "import os, socket, ssl, sys\n"
        "context = ssl.create_default_context()\n"
        "context.check_hostname, context.verify_mode = False, ssl.CERT_NONE\n"
        "os.setgid(int(sys.argv[4]))\n"
        "os.setuid(int(sys.argv[4]))  # from now on: that user may not be allowed to run, or read, this Python\n"
        "raw = socket.socket()\n"
        "raw.connect(('127.0.0.1', int(sys.argv[1])))\n"
        "raw = context.wrap_socket(raw)\n"
        "raw.sendall(b'POST /v1/' + sys.argv[2].encode() + b' HTTP/1.1\\r\\nhost: x\\r\\n'\n"
        "    b'content-type: application/protobuf\\r\\ncontent-length: 0\\r\\n\\r\\n')\n"
        "print(raw.recv(100)[:12].decode()) if sys.argv[3] == 'wait' else raw.close()\n"
    )

    def tried(port: int, path: str, how: str, user: int) -> str:
        command = [sys.executable, "-c", program, str(port), path, how, str(user)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    for port, path in ((federation.private, "control/list-nodes"), (federation.ports["node"], "runtime/acquire-task")):
        assert tried(port, path, "wait", 65534) == "HTTP/1.1 403"
        assert tried(port, path, "wait", 0) not in ("HTTP/1.1 403", "")  # the same request of the owner's
    before = federation.log("superlink").count('list-nodes HTTP/1.1" 200')
    for _ in range(20):
        tried(federation.private, "control/list-nodes", "go", 65534)
    time.sleep(1)
    assert federation.log("superlink").count('list-nodes HTTP/1.1" 200') == before
