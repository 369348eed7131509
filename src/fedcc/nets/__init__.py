"""Networks: the CIFAR ResNets, small ones for other inputs, and how any network becomes trunks and a head."""

from fedcc.nets.network import Network, build
from fedcc.nets.registry import BUILT_IN, NETWORKS, PLAIN, network
from fedcc.nets.resnet import ResNet

__all__ = ["BUILT_IN", "NETWORKS", "PLAIN", "Network", "ResNet", "build", "network"]
