"""Engines: they serve what methods ask for. ``plain`` is the reference."""

from fedcc.engine.drive import drive
from fedcc.engine.plain import Plain

__all__ = ["Plain", "drive"]
