"""What an operator's monitoring reads: ``/healthz`` and Prometheus' ``/metrics``, on a port of their own.

The listener is read-only: it serves two paths, reads no body, and nothing it is sent changes anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from fedcc.core.files import open_whole
from fedcc.experiments.store import RunFolder
from fedcc.flower.address import parse_address
from fedcc.flower.folder import FederationFolder
from fedcc.flower.gate_report import Report
from fedcc.flower.keys import public_bytes

HEAD_BYTES, HEAD_SECONDS = 8 * 2**10, 5.0  # of a request
CONNECTIONS = 16  # at a time; more are closed at once
FRESH_SECONDS = 1.0  # for which an answer is given again: however often it is asked, it costs the same
STATES = ("not started", "running", "stopped", "finished")
TEXT = "text/plain; charset=utf-8"


class Watch:
    """What is known of a federation whose server runs in this process."""

    def __init__(self, folder: FederationFolder, port: int, status: Callable[[], dict[str, Any]], superlink: int):
        self.folder, self.port, self.status = folder, port, status
        self.programs = {"server": "self", "superlink": str(superlink)}  # process ids

    def report(self) -> Report:
        return Report.fetch(self.port, self.folder.operator / "ca.crt")

    def problems(self) -> list[str]:
        """Why the server is not healthy; nothing if it is."""
        found = []
        try:
            self.report()
        except (OSError, ValueError, KeyError) as error:
            found.append(f"SuperLink does not answer: {error}")
        for folder in (self.folder.operator, self.folder.run):
            try:
                if folder.exists():
                    with open_whole(folder / "healthz") as file:
                        file.write(b"healthy\n")
            except OSError as error:
                found.append(f"{folder.name}/ is not writable: {error.strerror}")
        return found

    def collect(self) -> Iterator[Any]:
        """The metrics, as ``prometheus_client`` takes them from a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, text: str, values: Mapping[str, float], label: str = "") -> GaugeMetricFamily:
            family = GaugeMetricFamily(f"fedcc_{name}", text, labels=[label] if label else [])
            for key, value in values.items():
                family.add_metric([key] if label else [], value)
            return family

        def counter(name: str, text: str, values: Mapping[str, float], label: str) -> CounterMetricFamily:
            family = CounterMetricFamily(f"fedcc_{name}", text, labels=[label])
            for key, value in values.items():
                family.add_metric([key], value)
            return family

        status, records = self.status(), RunFolder(self.folder.run).metrics()
        yield gauge(
            "run_state", "1 for the state that the run is in", {s: s == status["state"] for s in STATES}, "state"
        )
        yield gauge("round", "the last round that is done", {"": status["round"]})
        yield gauge("rounds", "rounds of the run", {"": status["rounds"]})
        if status["accuracy"] is not None:
            yield gauge("accuracy_percent", "the last accuracy on the test set", {"": status["accuracy"]})
        if records:
            last, failures = records[-1], Counter(dict.fromkeys(self.folder.latest()[0].clients, 0))
            yield gauge(
                "round_seconds", "seconds that the last round waited for clients", {"": last["seconds"]["clients"]}
            )
            yield gauge("round_clients", "clients that took part in the last round", {"": len(last["present"])})
            yield counter("round_bytes", "bytes of the rounds' messages",
                          {way: sum(r["bytes"][way] for r in records) for way in ("up", "down")}, "way")  # fmt: skip
            for record in records:
                failures.update([*record["federation"]["failed"], *record["federation"]["refused"]])
            yield counter("client_failures", "rounds in which a client failed or was refused", failures, "client")
        aside = {name: float(row["aside"]) for name, row in status["clients"].items()}
        yield gauge("client_aside", "1 if a client is set aside", aside, "client")
        yield from self._report(gauge, counter)
        ends = {name: certificate_end(self.folder.operator / f"{name}.crt") for name in ("ca", "server")}
        yield gauge("certificate_expiry_timestamp_seconds", "when a certificate ends", ends, "certificate")
        memory = {name: float(size) for name, pid in self.programs.items() if (size := resident_bytes(pid))}
        yield gauge("process_resident_memory_bytes", "memory of a process", memory, "program")

    def _report(self, gauge: Callable[..., Any], counter: Callable[..., Any]) -> Iterator[Any]:
        """What the gate knows; a SuperLink that does not answer has none of it."""
        try:
            report = self.report()
        except (OSError, ValueError, KeyError):
            yield gauge("superlink_up", "1 if SuperLink answers", {"": 0})
            return
        yield gauge("superlink_up", "1 if SuperLink answers", {"": 1})
        keys = client_keys(self.folder)
        online = {name: float(key in report.online) for key, name in keys.items()}
        yield gauge("client_connected", "1 if a client is connected", online, "client")
        yield gauge("clients_connected", "clients that are connected", {"": sum(online.values())})
        uploads = {name: float(report.uploaded.get(key, 0)) for key, name in keys.items()}
        yield counter("upload_bytes", "bytes of a client's answers since the server started", uploads, "client")
        refusals = {name: float(report.refusals.get(key, 0)) for key, name in keys.items()}
        yield counter("client_refused_requests", "requests of a client that were refused", refusals, "client")
        yield counter("refused_requests", "requests refused at the public port", report.refused, "reason")
        yield counter("ended_connections", "connections cut at the public port", report.ended, "reason")
        yield gauge("open_connections", "connections at the public port", {"": report.open})


def client_keys(folder: FederationFolder) -> dict[bytes, str]:
    """The clients' names by their public keys; those that have sent no key yet or are revoked are missing."""
    folder, _ = folder.latest()
    return {public_bytes(folder.key(name)): name for name in folder.members}


def certificate_end(path: Path) -> float:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()


def resident_bytes(pid: str) -> int:
    """The memory of a process; 0 if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])
    return 0


@dataclass(frozen=True)
class Page:
    """A response."""

    status: str
    body: bytes
    kind: str = TEXT

    def head(self, with_body: bool = True) -> bytes:
        lines = [f"HTTP/1.1 {self.status}", f"Content-Type: {self.kind}", f"Content-Length: {len(self.body)}",
                 "Connection: close", "Cache-Control: no-store"]  # fmt: skip
        lines += ["Allow: GET, HEAD"] if self.status.startswith("405") else []
        return "\r\n".join([*lines, "", ""]).encode() + (self.body if with_body else b"")


class MetricsListener:
    """Serves a watch's pages in a thread until it is closed."""

    def __init__(self, address: str, watch: Watch):
        self.watch, self.pages = watch, dict[str, tuple[float, Page]]()
        self.open, self.lock = 0, threading.Lock()
        self.loop = asyncio.new_event_loop()
        host, port = parse_address(address)
        try:
            self.server = self.loop.run_until_complete(
                asyncio.start_server(self.serve, host, port, limit=HEAD_BYTES, backlog=CONNECTIONS)
            )
        except OSError as error:
            self.loop.close()
            raise ValueError(f"--metrics cannot listen on {address}: {error.strerror}") from None
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()

    async def _end(self) -> None:
        """Stop listening and end the requests in progress."""
        self.server.close()
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            if self.open <= CONNECTIONS:
                async with asyncio.timeout(HEAD_SECONDS + 30):
                    writer.write(await self.response(reader))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def response(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return Page("431 Request Header Fields Too Large", b"the header is too large\n").head()
        except TimeoutError:
            return Page("408 Request Timeout", b"the header did not arrive in time\n").head()
        method, target, *rest = [*head.split(b"\r\n", 1)[0].decode("latin-1").split(" "), "", ""]
        if not rest or not rest[0].startswith("HTTP/1."):
            return Page("400 Bad Request", b"not a request of HTTP/1\n").head()
        make = {"/healthz": self.health, "/metrics": self.metrics}.get(target.partition("?")[0])
        if method not in ("GET", "HEAD"):
            return Page("405 Method Not Allowed", b"only GET and HEAD\n").head()
        if make is None:
            return Page("404 Not Found", b"there are /healthz and /metrics\n").head()
        page = await asyncio.to_thread(self.fresh, target.partition("?")[0], make)
        return page.head(with_body=method == "GET")

    def fresh(self, name: str, make: Callable[[], Page]) -> Page:
        """A page that is at most a second old."""
        with self.lock:
            made, page = self.pages.get(name, (float("-inf"), Page("", b"")))
            if time.monotonic() - made > FRESH_SECONDS:
                try:
                    page = make()
                except Exception as error:  # a file that is being replaced, for example
                    page = Page("503 Service Unavailable", f"{type(error).__name__}\n".encode())
                self.pages[name] = time.monotonic(), page
            return page

    def health(self) -> Page:
        if problems := self.watch.problems():
            return Page("503 Service Unavailable", "".join(f"{p}\n" for p in problems).encode())
        return Page("200 OK", b"healthy\n")

    def metrics(self) -> Page:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self.watch)
        return Page("200 OK", generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4)
