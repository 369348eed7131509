"""Networks: the CIFAR ResNets, and how any network becomes trunks and a head."""

from fedcc.nets.network import Network, build
from fedcc.nets.resnet import NETWORKS, ResNet, network

__all__ = ["NETWORKS", "Network", "ResNet", "build", "network"]
