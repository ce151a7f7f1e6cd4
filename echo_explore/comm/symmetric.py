"""Closed forms of symmetric patterns from the figures of a cluster, without routing; equal to the flow engine by tests.

They hold for leaf-spine and rail-optimised fabrics of two levels whose leaves are full, under even spreading, for hosts
with one card a GPU under its own PCIe switch. Symbols: B bytes per second that a GPU drives (its card, within PCIe),
W of its scale-up links, h hosts a leaf, g GPUs a host, n GPUs in all, o oversubscription. Seconds, without latency.
"""

from echo_explore.core import SpecError
from echo_explore.specs import ClusterSpec


def card_rate(cluster: ClusterSpec) -> float:
    """B: bytes per second between one GPU and the network."""
    node = cluster.node
    if node.num_nics < node.num_gpus:
        raise SpecError("node.nics", node.num_nics, f"the closed form needs {node.num_gpus}: a card a GPU", "route it")
    cards = node.num_nics // node.num_gpus * node.nic_bandwidth_bytes_per_s
    return min(cards, node.pcie_bandwidth_bytes_per_s)


def incast_time(cluster: ClusterSpec, num_senders: int, num_bytes: float) -> float:
    """The same GPU of the next k hosts sends S bytes to one GPU, first of a leaf: S max(k/B, (k-h+1)/U).

    U is what a leaf has up, and down: h B_card / o where leaves belong to rails, g times that on a leaf-spine.
    """
    fabric = cluster.fabric
    h = fabric.nodes_per_leaf
    rails = 1 if fabric.topology == "rail-optimised" else cluster.node.num_gpus
    up = h * rails * cluster.node.network_bandwidth_bytes_per_s / cluster.node.num_gpus / fabric.oversubscription
    far = max(0, num_senders - h + 1)
    return num_bytes * max(num_senders / card_rate(cluster), far / up)


def shift_time(cluster: ClusterSpec, hosts: int, num_bytes: float) -> float:
    """Every GPU sends S bytes to the same GPU `hosts` hosts on: S max(1/B, o min(k, h) / (h B_card)).

    k = `hosts` of the h hosts of a leaf send across; the leaf has h B_card / o up for each rail.
    """
    if hosts == 0:
        return 0.0
    fabric, card = cluster.fabric, card_rate(cluster)
    across = min(hosts, fabric.nodes_per_leaf) / fabric.nodes_per_leaf
    up = cluster.node.network_bandwidth_bytes_per_s / cluster.node.num_gpus / fabric.oversubscription
    return num_bytes * max(1.0 / card, across / up)


def ring_time(cluster: ClusterSpec, num_bytes: float) -> float:
    """Rings of one GPU a host, one ring for each GPU of a host, S bytes an edge: a shift by one host."""
    return shift_time(cluster, 1, num_bytes)


def all_to_all_time(cluster: ClusterSpec, num_nodes: int, num_bytes: float) -> float:
    """All n GPUs send S bytes to each other: S max((g-1)/W, (n-g)/B, o (n-g-c)/B_card).

    c targets of other hosts lie under the sender's leaf: g (h-1) on a leaf-spine, h-1 where leaves belong to rails.
    """
    node, fabric = cluster.node, cluster.fabric
    n, g, h = num_nodes * node.num_gpus, node.num_gpus, min(fabric.nodes_per_leaf, num_nodes)
    near = (h - 1) * (1 if fabric.topology == "rail-optimised" else g)
    up = node.network_bandwidth_bytes_per_s / g / fabric.oversubscription
    inside = (g - 1) / node.link_bandwidth_bytes_per_s
    return num_bytes * max(inside, (n - g) / card_rate(cluster), (n - g - near) / up)
