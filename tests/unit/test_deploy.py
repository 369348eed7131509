"""The files in deploy/: systemd accepts the units, the commands in them exist, and the lock names no host."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
HARDENED = {"NoNewPrivileges=yes", "ProtectSystem=strict", "UMask=0077", "CapabilityBoundingSet=", "User=fedcc"}


def check_command(words: list[str]) -> None:
    """The command's options exist and have values that it accepts."""
    from fedcc.cli.federation import federation_app

    group = typer.main.get_command(federation_app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], words[1:])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_units_command_exists_and_it_is_closed(unit: Path) -> None:
    pytest.importorskip("flwr")
    lines = unit.read_text().splitlines()
    (start,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    program, federation, *words = shlex.split(start)
    assert (program, federation) == ("/opt/fedcc/bin/fedcc", "federation")
    check_command(words)
    assert set(lines) >= HARDENED
    assert f"ReadWritePaths={words[1]}" in lines


def test_a_run_waits_for_the_server(tmp_path: Path) -> None:
    """At a boot the server's unit has started long before the server listens."""
    lines = (DEPLOY / "fedcc-run.service").read_text().splitlines()
    (wait,) = [line.removeprefix("ExecStartPre=") for line in lines if line.startswith("ExecStartPre=")]
    program = tmp_path / "fedcc"  # says what `status` says: not running, twice, then running
    program.write_text(
        f"#!/bin/sh\necho $* >> {tmp_path}/calls\n"
        f"[ $(wc -l < {tmp_path}/calls) -gt 2 ] && echo 'server running; run stopped, round 1 of 3' && exit\n"
        "echo 'server not running; run stopped, round 1 of 3'\n"
    )
    program.chmod(0o755)
    words = shlex.split(wait.replace("/opt/fedcc/bin/fedcc", str(program)).replace("sleep 5", "sleep 0"))
    assert subprocess.run(words, check=False, timeout=20).returncode == 0
    assert (tmp_path / "calls").read_text().splitlines() == ["federation status /srv/fedcc/fed"] * 3


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    for other in UNITS:  # one requires another
        text = other.read_text().replace("/opt/fedcc/bin/fedcc", sys.executable)
        (tmp_path / other.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_of_the_compose_file_exist() -> None:
    pytest.importorskip("flwr")
    commands = re.findall(r"^    command: \[federation, (.*)\]$", (DEPLOY / "compose.yaml").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for text in commands:
        check_command([word.strip('"') for word in text.split(", ")])


def test_every_package_of_the_lock_has_a_version_and_hashes_and_no_host_is_named() -> None:
    text = (DEPLOY / "requirements.lock").read_text()
    packages = re.findall(
        r"^([a-z0-9._-]+)==(\S+) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.MULTILINE
    )
    entries = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(packages) == len(entries) > 50
    assert {"torch", "flwr", "cryptography", "prometheus-client"} <= {name for name, _ in packages}
    assert "://" not in text
    assert "/opt" not in text
