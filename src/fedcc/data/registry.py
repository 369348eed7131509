"""The available data sets. A new one is a file beside this one and a line here."""

from fedcc.core.naming import unknown
from fedcc.data.cifar import CIFAR10, CIFAR100
from fedcc.data.dataset import Description
from fedcc.data.digits import DIGITS
from fedcc.data.fashion import FASHION
from fedcc.data.tiny import TINY

DATASETS: dict[str, Description] = {d.name: d for d in (DIGITS, FASHION, CIFAR10, CIFAR100, TINY)}


def find_dataset(name: str) -> Description:
    """The data set of this name or alias, whatever its case and whether words are joined by '-', '_' or a space."""
    normalised = name.strip().lower().replace("_", "-").replace(" ", "-")
    for description in DATASETS.values():
        if normalised in (description.name, *description.aliases):
            return description
    raise unknown("data set", name, DATASETS)
