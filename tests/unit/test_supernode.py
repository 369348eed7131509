"""How a site starts its SuperNode."""

from __future__ import annotations

import ssl
from datetime import datetime, timedelta
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedcc.flower import lifetime, supernode
from fedcc.flower.create import APP
from fedcc.flower.keys import runtime_certificate
from fedcc.flower.programs import FlowerError, forget_apps
from fedcc.flower.supernode import Credentials


def says(certificate: Path, authority: Path, host: str = "127.0.0.1") -> str:
    """Why a program that trusts an authority does not believe who shows a certificate; empty if it does."""
    client = ssl.create_default_context(cafile=str(authority))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, certificate.with_name("server.key"))
    ways = [ssl.MemoryBIO() for _ in range(2)]
    ends = [
        client.wrap_bio(ways[0], ways[1], server_hostname=host),
        server.wrap_bio(ways[1], ways[0], server_side=True),
    ]
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
    return ""


def test_a_supernodes_processes_know_it_by_a_certificate_of_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes its port when it has ended cannot show it, so they take no app from there."""
    site: Any = SimpleNamespace(path=tmp_path, state=tmp_path)
    found: list[dict[str, bytes]] = []

    class Ended:
        def __init__(self, arguments: list[str], *_: Any):
            files = dict(pairwise(arguments))
            paths = [Path(files[f"--ssl-{name}"]) for name in ("ca-certfile", "certfile", "keyfile")]
            folder = paths[0].parent
            assert folder.stat().st_mode & 0o777 == 0o700
            assert paths[2].stat().st_mode & 0o777 == 0o600
            assert says(paths[1], paths[0]) == ""
            assert "IP address mismatch" in says(paths[1], paths[0], "127.0.0.2")
            assert sorted(path.name for path in folder.iterdir()) == ["ca.crt", "server.crt", "server.key"]
            with runtime_certificate(tmp_path / "thief") as thief:
                assert says(thief / "server.crt", paths[0])
            found.append({path.name: path.read_bytes() for path in paths})
            self.process = SimpleNamespace(poll=lambda: 0)

        def close(self) -> None:
            assert (tmp_path / "runtime").exists()

    monkeypatch.setattr(supernode, "ChildProcess", Ended)
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "ca.crt").write_text("what a killed program has left")
    for _ in range(2):
        supernode._run_supernode(site, "server:1", {}, Credentials(tmp_path), lambda *_: None)  # type: ignore[arg-type]
    assert not set(found[0].values()) & set(found[1].values())
    assert not (tmp_path / "runtime").exists()


@pytest.mark.parametrize("hours", [-2, 24 * 364.5])
def test_a_clock_that_is_set_right_ends_a_supernode_whose_certificate_it_makes_invalid(
    hours: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own processes would refuse it, and every round would fail."""
    site: Any = SimpleNamespace(path=tmp_path, state=tmp_path)
    shift, polls = [timedelta()], count()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + shift[0]

    def poll() -> int | None:
        shift[0] = timedelta(hours=hours)
        return 1 if next(polls) > 2 else None

    program = SimpleNamespace(process=SimpleNamespace(poll=poll), close=lambda: None)
    monkeypatch.setattr(supernode, "ChildProcess", lambda *_: program)
    monkeypatch.setattr(supernode, "datetime", Clock)
    supernode._run_supernode(site, "server:1", {}, Credentials(tmp_path), lambda *_: None)  # type: ignore[arg-type]
    assert next(polls) == 1


def test_a_client_that_stays_connected_is_warned_once_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a certificate that is about to expire, for example; a server that cannot be reached is Flower's business."""
    site: Any = SimpleNamespace(path=tmp_path, state=tmp_path)
    answers = iter([(None, ["the CA expires"]), ("unreachable", []), FlowerError("other CA")])
    hours, polls, said = [0.0], count(), list[str]()

    def reach(*_: Any) -> Any:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    def poll() -> int | None:
        hours[0] += 8
        return 1 if next(polls) >= 9 else None

    program = SimpleNamespace(process=SimpleNamespace(poll=poll), close=lambda: None)
    monkeypatch.setattr(supernode, "ChildProcess", lambda *_: program)
    monkeypatch.setattr(supernode, "reach", reach)
    monkeypatch.setattr(supernode, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(lifetime, "time", SimpleNamespace(monotonic=lambda: 3600 * hours[0]))
    say: Any = lambda message, level: said.append(f"{level} {message}")  # noqa: E731
    supernode._run_supernode(site, "server:1", {}, Credentials(tmp_path), say)
    assert said == ["warning note: the CA expires", "warning note: other CA"]
    assert not list(answers)


def test_an_app_that_flower_has_unpacked_in_part_is_unpacked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.install import install_from_fab

    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text(APP)
    fab = build_fab_from_disk(tmp_path / "app")
    unpacked = install_from_fab(fab, skip_prompt=True) / "pyproject.toml"
    unpacked.write_text("")
    install_from_fab(fab, skip_prompt=True)
    assert not unpacked.read_text(), "Flower has changed: forget_apps is not needed"
    forget_apps(tmp_path / "home")
    install_from_fab(fab, skip_prompt=True)
    assert "clientapp" in unpacked.read_text()
