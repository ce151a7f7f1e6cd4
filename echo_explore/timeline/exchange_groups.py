"""Which kinds of replicas exchange tokens with each other."""

from echo_explore.graph import Axis
from echo_explore.timeline.job import PipelineJob

OF_EXCHANGES = (Axis.EXPERT, Axis.EXPERT_MODEL)
"""Axes whose groups may have ranks of several kinds of replicas."""


def shares_exchanges(job: PipelineJob) -> list[bool]:
    """Whether a kind of replica exchanges tokens with another kind."""
    groups = job.exchange_groups
    return [groups.count(group) > 1 for group in groups]


def exchanging_ranks(job: PipelineJob) -> list[list[int]]:
    """Rank classes of one stage that exchange tokens with each other, of all groups of several kinds and stages."""
    groups, num_stages = job.exchange_groups, len(job.stages)
    members = [[k for k, own in enumerate(groups) if own == group] for group in dict.fromkeys(groups)]
    return [[kind * num_stages + s for kind in kinds] for kinds in members if len(kinds) > 1 for s in range(num_stages)]
