"""Traces of real training programs, made ex situ by a process of its own."""

from echo_explore.tracing.cache import CachedTracer
from echo_explore.tracing.request import TraceRequest, request_of
from echo_explore.tracing.service import TraceService

__all__ = ["CachedTracer", "TraceRequest", "TraceService", "request_of"]
