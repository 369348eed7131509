"""What a round is worth: accuracies, by the method's own rule and client by client."""

from fedcc.evaluate.accuracy import Evaluation, Metric, evaluate, readings_in_round

__all__ = ["Evaluation", "Metric", "evaluate", "readings_in_round"]
