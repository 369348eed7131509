"""A site's side of a federation: connect with Flower's SuperNode, and start it again whenever it ends."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

from fedcc.core.files import write_whole
from fedcc.core.rng import Key
from fedcc.engine import choose_device
from fedcc.experiments.toml import dumps
from fedcc.flower.address import parse_address
from fedcc.flower.answers import stored_labels
from fedcc.flower.command import read_public_key
from fedcc.flower.contact import reach
from fedcc.flower.data import errors_named, site_samples
from fedcc.flower.folder import Site
from fedcc.flower.fork_server import ForkServer
from fedcc.flower.gate import supernode_command
from fedcc.flower.keys import check_app_key, load_private_key, read_certificates, runtime_certificate
from fedcc.flower.lifetime import DAY, Reminder
from fedcc.flower.logs import LogFollower, Say, rotate
from fedcc.flower.own_network import own_network
from fedcc.flower.policy import Usage
from fedcc.flower.programs import ChildProcess, FlowerError, close_to_others, environment, forget_apps, free_port
from fedcc.flower.site_error import SiteError
from fedcc.inputs import TABLES
from fedcc.nets import build

RETRY_SECONDS = 10.0

CONNECTED, NOT_KNOWN, OTHER_CA = "SuperNode ID", "/v1/fleet/activate-node'", "CERTIFICATE_VERIFY_FAILED"
EXPLANATIONS = {  # parts of Flower's log lines, and what they mean to a site
    CONNECTED: "connected",
    "Receiving: train": "working on a round",
    "Receiving: query.model": "the server asks for the model",
    "Receiving: query.predict": "the server asks for predictions",
    "Sent successfully": "answered",
    NOT_KNOWN: "the server does not know this site's key, or a clock is off by over 5 minutes",
    OTHER_CA: "the server shows a certificate of another CA",
    "401 Unauthorized": "the server was restarted and does not know this session",
    "Failed to activate": "the server still holds an earlier session of this site",
}
PROBLEMS = {NOT_KNOWN, OTHER_CA, "401 Unauthorized", "Failed to activate"}  # of these


class Credentials:
    """A site's key, the other one while the key is being rotated, and what a server says to it.

    ``rotate`` at the site makes ``next.key``. The site uses its old key until the server refuses it, which means that
    the operator has put the new one in its place, then tries the other. When the new key is accepted, the old one is
    deleted.
    """

    def __init__(self, site: Path):
        self.key, self.next, self.previous = site / "site.key", site / "next.key", site / "previous.key"
        self.refused = self.other_authority = False

    def note(self, part: str) -> None:
        """Note what Flower says about the connection."""
        self.refused, self.other_authority = part == NOT_KNOWN, part == OTHER_CA
        if part == CONNECTED:
            self.previous.unlink(missing_ok=True)

    def change(self) -> bool:
        """Use the other key, if there is one and this one was refused.

        If it was cut off after a link, the key has two names, and the new one is taken back first.
        """
        if not self.refused:
            return False
        for other in (self.next, self.previous):
            if other.exists() and other.read_bytes() == self.key.read_bytes():
                other.unlink()
        if not (self.next.exists() or self.previous.exists()):
            return False
        if self.next.exists():
            os.link(self.key, self.previous)
            self.next.replace(self.key)
        else:
            os.link(self.key, self.next)
            self.previous.replace(self.key)
        return True


def take_part(
    site: Site,
    data: Path,
    say: Say,
    *,
    server: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    share_model: bool = False,
    label: str = "",
    network: str = "",
) -> None:
    """Take part in a federation until interrupted; the folder says what is not given.

    ``label`` is the column of a table with the classes; ``network`` is the site's own, if it brings one.
    """
    server, threads = server or site.server, threads or site.experiment.machine.threads
    parse_address(server)
    key = site.path / "site.key"
    if not key.is_file():
        raise ValueError(
            f"{key} is missing: put the operator's files into the folder that `fedcc federation join` made"
        )
    for file in (site.path / "ca.crt", site.path / "app.yaml"):
        if not file.is_file():
            raise ValueError(f"{file} is missing; the operator sends it with the site's folder")
    read_public_key(site.path / "command.pub")
    read_certificates(site.path / "ca.crt")  # a client with a damaged one would find no server, ever
    check_app_key(site.path / "app.yaml")
    load_private_key(key)
    if key.stat().st_mode & 0o077:
        raise ValueError(f"{key} can be read by others; chmod 600 {key}")
    share_model = share_model or site.share_model
    if bool(network) != site.brings_network:
        agreed = f"has agreed on {site.model}, which --network cannot change" if network else "brings its own network"
        raise ValueError(f"{site.name} {agreed}" + ("" if network else ": name it with --network"))
    if site.brings_network and share_model:
        raise ValueError(f"{site.name} brings its own network, so the server cannot use its model: no --share-model")
    if share_model and not site.may_share_model:
        raise ValueError(f"{site.name} shares no more than labels, but a model tells everything: no --share-model")
    if label and data.suffix.lower() not in TABLES:
        raise ValueError(f"--label names a column of a table, got --label {label} for {data}")
    label = label or site.experiment.split.label
    samples = site_samples(data, site.task, label)
    site.task.public_samples(site.path / "public.npz")
    try:
        site.check_policy()
    except SiteError as error:
        raise ValueError(f"the policy of {site.name} forbids it: {error}") from None
    say(f"{site.name}: {len(samples)} samples of {data}, {network or site.model}, server {server}")
    for text in (policy_text(site), *ledger_lines(site)):
        if text:
            say(text)
    site.state.mkdir(exist_ok=True)
    close_to_others(site.state)
    config = {"site": str(site.path), "data": str(data.resolve()), "device": device, "threads": threads,
              "share-model": share_model, "label": label, "network": network, "code": str(Path.cwd())}  # fmt: skip
    # The fork server comes before CUDA is initialised: no fork survives that.
    with only_client(site), closing(ForkServer(site.state / "warm")) as fork_server:
        forget_apps(site.state / "home")
        write_whole(site.state / "node.toml", dumps(config))
        choose_device(device)
        if network:  # after the fork: what the code initialises may not survive one
            check_network(site, network)
        env = environment(site.state / "home", threads)
        env["PATH"] = f"{fork_server.folder}{os.pathsep}{env['PATH']}"
        for contacts in count():
            _wait_for_server(server, site.path, say, known=contacts > 0)
            credentials = Credentials(site.path)
            _run_supernode(site, server, env, credentials, say)
            if credentials.change():
                say("trying the site's other key: it is being rotated")
            text = "the connection has ended; retrying in {:g} s (a server may keep a session for a minute)"
            say(text.format(RETRY_SECONDS), "warning")
            time.sleep(RETRY_SECONDS)


@contextmanager
def only_client(site: Site) -> Iterator[None]:
    """Refuse a second client of a site's folder: the server holds one session for its key, and would turn it away."""
    from filelock import FileLock, Timeout

    try:
        lock = FileLock(site.state / "client.lock").acquire(timeout=0)
    except Timeout:
        advice = "end it first, or join with a folder and a name of its own"
        raise FlowerError(f"another client takes part with {site.path}; {advice}") from None
    with lock:
        yield


def _wait_for_server(server: str, site: Path, say: Say, known: bool) -> None:
    """Return when the server can be reached.

    A server that is not the federation's is an error, unless it is ``known`` that the address is right: then somebody
    on the way answers in its place, such as a network that wants a login first, and that may end.
    """
    said = None
    for tries in count():
        try:
            reason, notes = reach(server, site)
        except FlowerError as error:
            if not known:
                raise
            reason, notes = str(error), []
        if reason is None:
            break
        if reason != said:
            say(f"the server cannot be reached ({reason}); retrying until it can be", "warning")
            said = reason
        time.sleep(min(RETRY_SECONDS, 2**tries))
    for note in notes:
        say(f"note: {note}", "warning")


def policy_text(site: Site) -> str:
    """The site's limits and how much of them is used, in words; empty if it has none."""
    used = Usage.of(site.audit.entries())
    numbers = {"runs": len(used.runs), "rounds": used.rounds, "queries": used.queries}
    limits = {name: limit for name, limit in site.policy.table().items() if name in numbers}
    parts = [f"{numbers[n]:,} of {limits[n]:,} {n} used" for n in limits]
    parts += [f"shares {site.policy.share} or less"] if site.policy.share != "predictions" else []
    return "policy: " + ", ".join(parts) if parts else ""


def ledger_lines(site: Site) -> list[str]:
    """What the site is about to share with noise, and what it has disclosed so far."""
    training = site.experiment.training
    if training.share != "noisy":
        return []
    promise = (
        f"share=noisy: epsilon {training.answer_epsilon:g} for each single answer; a record may change all answers"
    )
    ledger = site.audit.ledger()
    stored_labels(site.state, ledger.answers)  # an error if they are damaged
    return [promise, *ledger.text().splitlines()]


def check_network(site: Site, name: str) -> None:
    """Refuse a network that the site cannot use."""
    arch = site.task.arch(site.experiment.build_method(), own_network(name, site.task.shape))
    with errors_named(f"{name} cannot be the network of {site.name}"):
        build(arch, Key(0))


def without_colours(line: str) -> str:
    r"""A line of Flower's log as :class:`LogFollower` passes it on, without the codes for colours.

    >>> without_colours(r"\x1b[91mERROR \x1b[0m: Exit Code: 305")
    'ERROR : Exit Code: 305'
    """
    return re.sub(r"\\x1b\[[\d;]*m", "", line)


def _run_supernode(site: Site, server: str, env: dict[str, str], credentials: Credentials, say: Say) -> None:
    """Run a SuperNode until it ends, or the server has a new CA: it would try the old one forever.

    It ends too when its certificate is not valid, as when a clock that was ahead is set back: the next one will be.
    """
    with ExitStack() as ends:
        runtime = ends.enter_context(runtime_certificate(site.state / "runtime"))
        (certificate,) = read_certificates(runtime / "server.crt")
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc - timedelta(days=1)
        follower = LogFollower(site.state / "supernode.log", lambda line: explain(line, credentials, say))
        remind = Reminder(lambda: look_at_server(server, site.path), say, first=DAY)
        command = supernode_command(*supernode_arguments(site, server, runtime))
        child = ends.enter_context(closing(ChildProcess(command, env, follower.path)))
        ended = False
        while not ended and not credentials.other_authority and first <= datetime.now(UTC) < last:
            time.sleep(0.2)
            ended = child.process.poll() is not None  # asked first, so that its last lines are there
            follower.poll()
            rotate(follower.path, copy=True)
            remind()


def look_at_server(server: str, site: Path) -> list[str]:
    """What a site that is connected should know of the server: certificates expire during a connection, too."""
    try:
        _, notes = reach(server, site)
    except FlowerError as error:
        notes = [str(error)]
    return [f"note: {note}" for note in notes]


def supernode_arguments(site: Site, server: str, runtime: Path) -> tuple[str, ...]:
    """What a site's SuperNode is told; ``runtime`` is the folder of the certificate for its own processes."""
    return (
        *("--superlink", server, "--root-certificates", str(site.path / "ca.crt")),
        *("--auth-supernode-private-key", str(site.path / "site.key")),
        *("--trusted-entities", str(site.path / "app.yaml")),
        *("--node-config", str(site.state / "node.toml")),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--ssl-ca-certfile", str(runtime / "ca.crt"), "--ssl-certfile", str(runtime / "server.crt")),
        *("--ssl-keyfile", str(runtime / "server.key")),
    )


def explain(line: str, credentials: Credentials, say: Say) -> None:
    """Say what a line of Flower's log means to a site, if anything."""
    line = without_colours(line)
    text = line.partition("INFO")[2].partition(":")[2].strip() or line
    for part, meaning in EXPLANATIONS.items():
        if part in text:
            credentials.note(part)
            say(meaning, "warning" if part in PROBLEMS else "info")
            return
    if "ERROR" in line or "Error:" in line or "fedcc:" in line:
        say(text, "warning")
