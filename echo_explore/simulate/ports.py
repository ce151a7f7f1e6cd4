"""The parts that a Simulator is made of. Each is a Protocol, so that it can be replaced and tested by itself."""

from typing import Protocol

from echo_explore.comm.exchange import ExchangeRequest
from echo_explore.comm.request import CollectiveRequest, CollectiveTime
from echo_explore.comm.schedule import CollectivePlan
from echo_explore.compute.times import KernelTimes
from echo_explore.graph import ExecutionGraph, Trace
from echo_explore.interference import Pairing
from echo_explore.specs import ClusterSpec, DeviceSpec, StackProfile
from echo_explore.tracing.request import TraceRequest


class Tracer(Protocol):
    """Gives the trace of a request, from its cache or by running the framework."""

    def trace(self, request: TraceRequest) -> Trace:
        """The trace; the caller never imports torch."""


class ComputeModel(Protocol):
    """Prices kernels."""

    @property
    def reference(self) -> str:
        """Where its formulas and coefficients come from."""

    @property
    def version(self) -> int:
        """Raised with every change of a price."""

    def covers(self, device: DeviceSpec) -> bool:
        """Whether the device is one that its coefficients know, and not priced from its specification alone."""

    def kernel_times(self, graph: ExecutionGraph, device: DeviceSpec, stack: StackProfile) -> KernelTimes:
        """Seconds of every compute row alone; 0 for other rows."""


class CollectiveModel(Protocol):
    """Prices collectives and transfers."""

    @property
    def reference(self) -> str:
        """Where its formulas and coefficients come from."""

    @property
    def version(self) -> int:
        """Raised with every change of a price."""

    def collective_time(self, request: CollectiveRequest, cluster: ClusterSpec) -> CollectiveTime:
        """Seconds of one collective alone; 0 for one rank."""

    def for_stack(self, stack: StackProfile, cluster: ClusterSpec) -> "CollectiveModel":
        """The same with the library and the settings of a stack."""

    def exchange_time(self, request: ExchangeRequest, cluster: ClusterSpec) -> CollectiveTime:
        """Seconds of one fused exchange of tokens and experts alone; 0 for one rank."""

    def plan(self, request: CollectiveRequest, cluster: ClusterSpec) -> CollectivePlan:
        """Its algorithm, protocol, channels (SMs) and chunks, for a group of two ranks or more."""


class InterferenceModel(Protocol):
    """How kernels and collectives on one GPU slow each other down."""

    @property
    def reference(self) -> str:
        """Where its figures come from."""

    @property
    def version(self) -> int:
        """Raised with every change of a figure."""

    def pairing(self, device: DeviceSpec) -> Pairing:
        """Starts a job on that GPU: collects what runs, then gives the factors."""
