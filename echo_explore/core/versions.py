"""Versions that travel with artefacts and predictions."""

PACKAGE_VERSION = "0.1.0"
MODEL_VERSION = 5
"""Raised by every change that moves a prediction; docs/accuracy.md is regenerated with it."""
GRAPH_SCHEMA = 5
"""Raised when the columns of an execution graph or the layout of a trace file change."""
TRACER_VERSION = 19
"""Raised when the tracer records the same program differently; part of every trace key."""
SPEC_SCHEMA = 1
"""The `schema = 1` line of search spaces, clusters, models and stack profiles."""
LEDGER_SCHEMA = 1
