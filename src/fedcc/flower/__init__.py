"""Federations across machines, on Flower: the methods of the simulator, unchanged, with each client at its own site.

``pip install '.[flower]'`` in fedcc's checkout, at every site; docs/federation.md and ``fedcc federation --help`` say
the rest.
"""
