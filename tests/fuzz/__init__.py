"""Damaged and hostile inputs for everything that fedcc reads: ``make fuzz`` runs them. See :mod:`fuzz.harness`."""
