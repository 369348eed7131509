"""FedCC: federated learning by distillation, with clients that may answer "unknown"."""

__version__ = "0.1.0"
