"""Fits from measurements: kernels, collectives, overlap, steps."""
