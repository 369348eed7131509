"""Networks of the clients by name, and the stand-in for one that only its site knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedcc.code import allow, is_reference
from fedcc.core.model import Arch, Factory
from fedcc.nets import network

OWN = "own"  # a network, data or a split that is the sites' own


class NotKnown(ValueError):
    """The server needs more of a site's own network than its outputs."""


@dataclass(frozen=True)
class AtSite:
    """A network that only its site can build."""

    def __call__(self, outputs: int) -> nn.Module:
        raise NotKnown("only the site knows its own network, so nobody else can build it")

    def __str__(self) -> str:
        return OWN


class UnknownState(Mapping[str, Tensor]):
    """The state of such a network: nobody but the site can read or send it."""

    def __getitem__(self, name: str) -> Tensor:
        raise NotKnown("only the site knows the weights of its own network")

    def __iter__(self) -> Iterator[str]:
        raise NotKnown("only the site knows the weights of its own network")

    def __len__(self) -> int:
        raise NotKnown("only the site knows the weights of its own network")


def is_at_site(arch: Arch) -> bool:
    """Whether a network is a site's own."""
    return any(isinstance(trunk, AtSite) for trunk in arch.trunks)


def client_network(name: str, shape: tuple[int, ...]) -> Factory:
    """A client's network as a federation's files name it; code that they name is never imported."""
    if name == OWN:
        return AtSite()
    if is_reference(name):
        raise ValueError(
            f"{name} is code, which a federation's files cannot name: give the client as NAME={OWN}, and the site "
            f"names it with `fedcc federation client --network {name}`"
        )
    return network(name, shape)


def own_network(name: str, shape: tuple[int, ...]) -> Factory:
    """The network that a site has named on its own command line, so that code may be imported."""
    allow(name)
    return network(name, shape)
