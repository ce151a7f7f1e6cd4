"""Ray: a cluster of its own or the job's, actors that evaluate and trace. Nothing else imports Ray."""

from echo_explore.core import MissingExtra

try:
    import ray as _ray  # noqa: F401 - only to name the extra that brings it
except ImportError as _error:
    raise MissingExtra("search with Ray", "search") from _error

from echo_explore.search.pool.cluster import connected
from echo_explore.search.pool.ray_pool import PoolOptions, RayPool

__all__ = ["PoolOptions", "RayPool", "connected"]
