"""The server's memory and rounds while others try to fill it: strangers with slow connections, and a client with too
large an upload."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from attacker import Attacker, refused, texts_of
from federation import NAMES, Real, make, real
from flood import Flood
from program import descendants, wait_until

pytestmark = pytest.mark.slow

MIB = 2**20


def superlink(federation: Real, server: Any) -> Callable[[], float]:
    """The memory of the server's SuperLink, in MiB."""
    for pid in descendants(server.pid):
        if b"superlink\0--public" in Path(f"/proc/{pid}/cmdline").read_bytes():
            status = Path(f"/proc/{pid}/status")
            return lambda: int(status.read_text().partition("VmRSS:")[2].split()[0]) / 1024
    raise AssertionError(federation.said(server))


def test_the_server_withstands_a_flood_and_a_client_that_uploads_too_much(tmp_path: Path) -> None:
    """200 connections that never finish; then a reply of 150 MiB where 6 kB are due, in objects that are small enough
    one by one."""
    folder = make(
        tmp_path / "f", "fedcc", NAMES[:3], rules={"quorum": 2, "grace": 2.0}, rounds=40, skew="iid", epochs=0
    )
    metrics = folder.run / "metrics.jsonl"

    def seconds() -> list[float]:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line)["seconds"]["clients"] for line in lines]

    with real(folder, tmp_path / "programs") as federation:
        memory = superlink(federation, federation.server())
        for name in NAMES[:2]:
            federation.client(name)
        federation.run()
        wait_until(lambda: len(seconds()) >= 4, 240)
        before, start, highest = seconds()[1:], memory(), 0.0
        with Flood(folder.port, 200) as flood:
            end, first = time.monotonic() + 240, len(seconds()) + 1  # the round that is under way does not count
            while len(seconds()) < first + 3 and time.monotonic() < end:
                highest = max(highest, memory())
                time.sleep(0.2)
            during = seconds()[first:]
            wait_until(lambda: {"handshake", "header"} <= flood.cut.keys(), 60)  # after 20 s each
        calm = time.monotonic() + 60
        while memory() > start + 50 and time.monotonic() < calm:
            time.sleep(1)
        after = memory()
        print(f"flood: {start:.0f} MiB before, at most {highest:.0f} during, {after:.0f} after; cut: {dict(flood.cut)}")
        print(f"rounds: {mean(before):.1f} s before, {[round(s, 1) for s in during]} during")
        assert highest < 400
        assert after < start + 50
        assert len(during) >= 3, "no round was finished"
        assert mean(during) < 2 * mean(before)

        attacker = Attacker(folder.path / "sites" / NAMES[2], folder.port)
        asked = attacker.pull()
        array = Array("float32", (150 * MIB // 4,), "fedcc", bytes(150 * MIB))
        texts = ConfigRecord({"nonce": texts_of(asked).get("nonce", ""), "kind": "Predictions", "header": "{}"})
        content: Any = RecordDict({"fedcc": texts, "arrays": ArrayRecord({"float32": array})})  # type: ignore[arg-type]
        about = {"run_id": asked.metadata.run_id, "reply_to_message_id": asked.metadata.message_id}
        with pytest.raises(httpx.HTTPStatusError) as error:
            attacker.push(attacker.message(content, **about))
        print(refused(error.value), f"{memory():.0f} MiB")
        assert "bytes in this round" in refused(error.value)
        assert memory() < after + 50
        count = len(seconds())
        wait_until(lambda: len(seconds()) >= count + 3, 90)  # the rest of that reply is not waited for
