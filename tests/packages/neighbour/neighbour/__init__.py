"""A neighbour of fedcc: a method, a network and a data set by entry points."""
