"""Optuna without the warnings that this package has answered."""

import contextlib
import warnings
from collections.abc import Iterator

import optuna


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's warnings: which samplers are experimental, and that CMA-ES does not use constraints."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="optuna.*")
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", message=".*(independent|[Cc]onstraints|[Ss]ampler).*")
        yield
