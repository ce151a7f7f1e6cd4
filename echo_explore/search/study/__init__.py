"""Optuna: samplers that propose points, and the study that the dashboard shows. Nothing else imports Optuna."""

from echo_explore.core import MissingExtra

try:
    import optuna as _optuna
except ImportError as _error:
    raise MissingExtra("search", "search") from _error

from echo_explore.search.study.mirror import StudyMirror
from echo_explore.search.study.samplers import SAMPLERS, OptunaProposer
from echo_explore.search.study.storage import open_storage

_optuna.logging.set_verbosity(_optuna.logging.WARNING)

__all__ = ["SAMPLERS", "OptunaProposer", "StudyMirror", "open_storage"]
