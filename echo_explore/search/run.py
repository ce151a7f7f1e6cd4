"""A whole search: what the command, the script and the Python entry point are thin over."""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO, cast

from echo_explore.core import (
    MissingExtra,
    SpecError,
    StudyError,
    check_name,
    content_hash,
    write_atomic,
)
from echo_explore.core.home import refuse_job_copy, state_folder
from echo_explore.core.versions import LEDGER_SCHEMA, MODEL_VERSION, PACKAGE_VERSION
from echo_explore.search.driver import Driver, DriverOptions, Ending
from echo_explore.search.enumerate import BoundTable, EnumerateProposer, num_violations
from echo_explore.search.failures import standing_failures
from echo_explore.search.interrupts import Interrupts
from echo_explore.search.ledger import Header, Ledger, check_same_study, read_ledger
from echo_explore.search.local_pool import LocalPool
from echo_explore.search.note import launch_note
from echo_explore.search.objective import dominates
from echo_explore.search.options import (
    DEFAULT_SAMPLER_WINDOW,
    DEFAULT_TRIALS,
    DEFAULT_WINDOW,
    ENUMERATE_LIMIT,
    SearchOptions,
)
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Evaluator, EvaluatorFactory, Mirror, Pool, Proposer, TrialRecord
from echo_explore.search.progress import Progress
from echo_explore.search.ray_environment import prepare
from echo_explore.search.result import SearchResult, best_trials, count_trials, record_row
from echo_explore.search.space import ResolvedSpace, enumerate_points, resolve_space, with_objective
from echo_explore.search.storage_name import masked, resolve_storage
from echo_explore.specs import load_space

__all__ = ["SearchOptions", "SearchResult", "default_study_name", "run_search"]


def run_search(
    options: SearchOptions, *, factory: EvaluatorFactory | None = None, stream: TextIO | None = None
) -> SearchResult:
    """Search, or go on with a search, or give the result of a finished one.

    Args:
        options: what to search and how.
        factory: makes evaluators; default: those of the simulator.
        stream: for progress; default: stderr.

    Raises:
        SpecError: something the user gave is wrong.
        StudyError: the study belongs to another search, is being written by another driver, or is damaged.
        MissingExtra: Optuna or Ray is not installed.
    """
    _require_extra(options)
    space = load_space(options.space) if isinstance(options.space, str) else options.space
    if options.objective is not None:
        space = with_objective(space, options.objective)
    resolved = resolve_space(space)
    session = _Session(options, resolved, factory or _simulator_factory(resolved, options))
    finished = session.finished_result()
    return finished if finished is not None else session.run(stream or sys.stderr)


def default_study_name(space: ResolvedSpace, identity: dict[str, str], seed: int) -> str:
    """The space's name and 8 hex digits of space, model version, calibration and seed."""
    digest = content_hash([space.hash, MODEL_VERSION, identity, seed], num_hex=8)
    return check_name(f"{space.space.name or 'search'}-{digest}", field="study")


class _Session:
    """One run of the command: names, files, and the parts that the driver is put together from."""

    def __init__(self, options: SearchOptions, space: ResolvedSpace, factory: EvaluatorFactory) -> None:
        self.options, self.space, self.factory = options, space, factory
        identity = factory.identity()
        self.study = (
            check_name(options.study, field="study")
            if options.study is not None
            else default_study_name(space, identity, options.seed)
        )
        self.folder = state_folder("studies") / self.study
        self.ledger_path = self.folder / "ledger.jsonl"
        self.existing = read_ledger(self.ledger_path)
        if options.resume and self.existing is None:
            raise StudyError("study", self.study, "does not exist, so it cannot be resumed", "leave --resume out")
        self.identity = identity
        self.storage = self._storage()

    def _storage(self) -> str:
        return resolve_storage(self.options.storage or str(self.folder / "study.log"))

    def header(self, sampler: str) -> Header:
        """The first line of the ledger."""
        return {
            "schema": LEDGER_SCHEMA,
            "space_hash": self.space.hash,
            "space": self.space.space.model_dump(mode="json", by_alias=True),
            "model_version": MODEL_VERSION,
            "identity": self.identity,
            "seed": self.options.seed,
            "window": self.options.window or DEFAULT_WINDOW.get(sampler, DEFAULT_SAMPLER_WINDOW),
            "sampler": sampler,
            "objectives": list(self.space.objectives),
            "written_by": PACKAGE_VERSION,
        }

    def sampler(self, num_legal: int | None) -> str:
        """What `auto` means: what the study was made with, else enumeration where the space is small enough."""
        if self.options.sampler != "auto":
            return self.options.sampler
        if self.existing is not None:
            return str(self.existing.header["sampler"])
        return "enumerate" if num_legal is None or num_legal <= ENUMERATE_LIMIT else "tpe"

    def max_trials(self, sampler: str) -> int | None:
        """Trials after which the study ends; None: when nothing is left."""
        return self.options.trials or (None if sampler == "enumerate" else DEFAULT_TRIALS)

    def finished_result(self) -> SearchResult | None:
        """The result of a study that is finished already, without starting anything."""
        if self.existing is None:
            return None
        sampler = self.sampler(None)
        header = self.header(sampler)
        check_same_study(self.existing.header, header, self.ledger_path)
        end = self.existing.end
        if end is None:
            return None
        limit = self.max_trials(sampler)
        num_proposed = len({record.point for record in self.existing.records})  # retries are of points tried before
        if end["ending"] != "exhausted" and (limit is None or limit > num_proposed):
            return None
        if self.options.resume and standing_failures(self.existing.records):
            return None
        if self.options.storage is not None or not (self.folder / "study.log").exists():
            with Ledger(self.ledger_path, header) as ledger, contextlib.closing(self._mirror()) as mirror:
                mirror.offer(ledger.records)
        return self.result(self.existing.records, header, cast("Ending", end["ending"]), end)

    def run(self, stream: TextIO) -> SearchResult:
        """Search or go on."""
        with ExitStack() as stack:
            progress = Progress(stream)
            progress.start(f"study {self.study}: listing legal points")
            stack.callback(progress.close)
            interrupts = stack.enter_context(Interrupts())
            with interrupts.raising():
                points = enumerate_points(self.space)
                sampler = self.sampler(len(points))
                self._make_folder()
                ledger = stack.enter_context(Ledger(self.ledger_path, self.header(sampler)))
                known = f"{len(points):,} legal points, {len(ledger.records):,} trials known"
                progress.phase(f"{known}: reading the models")
                evaluator = self.factory.build(self.factory.shared())
                progress.phase(f"{known}: bounding the points")
                bounds = BoundTable(evaluator, self.space.objectives, self.space.cluster)
                proposer = self._proposer(sampler, points, bounds)
                progress.phase(f"{known}: opening the study for the dashboard")
                mirror = self._mirror()
                stack.callback(mirror.close)
                progress.phase(f"{known}: " + ("starting" if self.options.address == "none" else "starting Ray"))
                pool = self._pool(evaluator)
                stack.callback(pool.close)
                interrupts.install()
            progress.phase(f"searching {len(points):,} legal points ({sampler})")
            driver = Driver(
                DriverOptions(
                    num_legal=len(points),
                    max_trials=self.max_trials(sampler),
                    window=int(ledger.header["window"]),
                    objectives=self.space.objectives,
                    retry_failures=self.options.resume,
                ),
                cluster=self.space.cluster,
                ledger=ledger,
                proposer=proposer,
                bounds=bounds,
                pool=pool,
                mirror=mirror,
                progress=progress,
                stop=interrupts,
            )
            ending = driver.run()
            end = self._end(ending, points, bounds, driver)
            if ending in ("exhausted", "trials"):
                progress.phase("writing the timeline of the best")
                self._write_best(ledger.records, evaluator, pool)
                ledger.append_end(end)
            progress.phase("closing")
            return self.result(ledger.records, ledger.header, ending, end)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot be made ({error.strerror or error})"
            raise StudyError("study", str(self.folder), why, "give another --study, or move it away") from error

    def _proposer(self, sampler: str, points: Sequence[SearchPoint], bounds: BoundTable) -> Proposer:
        if sampler == "enumerate":
            return EnumerateProposer(points, bounds)
        from echo_explore.search.study import OptunaProposer

        return OptunaProposer(
            points, bounds, sampler=sampler, seed=self.options.seed, num_objectives=len(self.space.objectives)
        )

    def _mirror(self) -> Mirror:
        from echo_explore.search.study import StudyMirror

        return StudyMirror(
            self.storage,
            name=self.study,
            identity=content_hash([self.space.hash, MODEL_VERSION, self.identity, self.options.seed]),
            objectives=self.space.objectives,
            axes=self.space.axes,
            facts={
                "space": self.space.space.name,
                "ledger": str(self.ledger_path),
                "model_version": str(MODEL_VERSION),
            },
            note=lambda record: launch_note(record, self.space),
        )

    def _pool(self, evaluator: Evaluator) -> Pool:
        if self.options.address == "none":
            return LocalPool(evaluator)
        prepare(self.options.address)
        from echo_explore.search.pool import RayPool

        return RayPool(self.factory, evaluator, address=self.options.address, num_workers=self.options.workers)

    def _end(self, ending: Ending, points: Sequence[SearchPoint], bounds: BoundTable, driver: Driver) -> dict[str, Any]:
        """What the ledger's last line says: also how many points no trial was spent on because of their bounds."""
        records = driver.records
        tried = {record.point for record in records}
        feasible = [record.values for record in records if record.feasible]
        rest = [bounds(point) for point in points if point not in tried]
        over_memory = sum(b.memory_overshoot > 0.0 for b in rest)
        worse = sum(b.memory_overshoot <= 0.0 and any(dominates(values, b.values) for values in feasible) for b in rest)
        return {
            "ending": ending,
            "num_legal": len(points),
            "num_untried_over_memory": over_memory,
            "num_untried_worse": worse,
            "num_bound_violations": num_violations(records, bounds),
        }

    def result(
        self, records: Sequence[TrialRecord], header: Header, ending: Ending, end: Mapping[str, Any]
    ) -> SearchResult:
        """The result that these trials make."""
        counts = count_trials(
            records,
            num_legal=int(end["num_legal"]),
            num_untried_over_memory=int(end["num_untried_over_memory"]),
            num_untried_worse=int(end["num_untried_worse"]),
        )
        best = best_trials(records, self.space.objectives)
        timeline = self._timeline_path(best[0]) if best else None
        failures = tuple(f"{r.point.label()}: {r.reason}" for r in standing_failures(records))
        return SearchResult(
            study=self.study,
            folder=self.folder,
            header=header,
            objectives=self.space.objectives,
            counts=counts,
            ending=ending,
            certified=counts.covers_all and not end["num_bound_violations"],
            best=best,
            failures=failures,
            timeline=timeline if timeline and timeline.exists() else None,
            storage=masked(self.storage),
            next_command=_next_command(ending, len(records)),
        )

    def _timeline_path(self, record: TrialRecord) -> Path:
        return self.folder / f"best-trial-{record.trial}.perfetto.json"

    def _write_best(self, records: Sequence[TrialRecord], evaluator: Evaluator, pool: Pool) -> None:
        """Write best.json and the timeline of the best."""
        best = best_trials(records, self.space.objectives)
        if not best:
            return
        path = self._timeline_path(best[0])
        refuse_job_copy(path, field="ECHO_EXPLORE_HOME")
        if not path.exists():
            pool.bring_trace(best[0].point)
            evaluator.write_timeline(best[0].point, path)
        rows = [record_row(record, self.space.objectives) for record in best]
        write_atomic(self.folder / "best.json", (json.dumps(rows, indent=1, sort_keys=True) + "\n").encode())


def _next_command(ending: Ending, num_trials: int) -> str:
    match ending:
        case "interrupted":
            return f"interrupted after {num_trials:,} trials: the same command continues"
        case "failures":
            return "stopped because candidates failed: see the causes above; --resume tries them again and goes on"
        case _:
            return ""


def _require_extra(options: SearchOptions) -> None:
    wanted = ("optuna", "optuna_dashboard") + (() if options.address == "none" else ("ray",))
    for module in wanted:
        found = importlib.util.find_spec(module)
        if found is None:
            raise MissingExtra("search", "search")
        if found.submodule_search_locations is None:  # a script of that name in the folder where this was started
            raise SpecError("file", str(found.origin), f"hides the package {module}", "rename it or go elsewhere")


def _simulator_factory(space: ResolvedSpace, options: SearchOptions) -> EvaluatorFactory:
    from echo_explore.search.evaluate import SimulatorFactory
    from echo_explore.simulate.presets import DEFAULT_INTERFERENCE

    interference = options.interference or DEFAULT_INTERFERENCE
    return SimulatorFactory(space=space, calibration=options.calibration, interference=interference)
