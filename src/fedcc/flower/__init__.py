"""Federations across machines, on Flower: the methods of the simulator, unchanged, with each client at its own site.

``pip install 'fedcc[flower]'`` at every site; ``fedcc federation --help`` and docs/federation.md say the rest.
"""
