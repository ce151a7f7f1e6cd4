"""What is made of predictions and studies for people: pictures."""

from echo_explore.results.timeline_svg import timeline_svg

__all__ = ["timeline_svg"]
