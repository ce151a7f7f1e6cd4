"""Fakes, strategies and contract suites: imported by tests and Ray workers only."""
