"""What a round is worth: accuracies, by the method's own rule and client by client."""

from fedcc.evaluate.accuracy import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
