"""The story of a training run: check, plan, build the engine, take the steps, export, show a sample.

Everything cheap that can be wrong (options, model config, data, run folder) is checked before memory is reserved or
weights are read.
"""

import contextlib
import dataclasses
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from flexengine.api import PlannedRun, open_source, prepare_job
from flexengine.checkpoint.atomic import write_text
from flexengine.data import GlobalBatches, SyntheticBatches, TokenizerProcess
from flexengine.data.templates import today
from flexengine.metrics import EvalMetrics, JsonlWriter, Pace, StepMetrics
from flexengine.models.registry import ModelSource
from flexengine.optim import OPTIMIZERS, AdamW, Muon, Optimizer
from flexengine.optim.lr_schedule import LrSchedule
from flexengine.options.train_config import BEST_FOLDER, EVAL_LOG_FILE, FINAL_FOLDER, LOG_FILE, TrainConfig
from flexengine.output import INTERRUPTED, run_output
from flexengine.parallel.team import Team, is_first, join, told_by_first
from flexengine.run.callbacks import Callback, Callbacks
from flexengine.run.card_health import StepCard
from flexengine.run.closing import show_samples, summary
from flexengine.run.compiled_kernels import READY, begin_compiler, built_with_kernels
from flexengine.run.evaluation import EVALUATIONS, Evaluator, EvaluatorActions
from flexengine.run.feedback import Reviewer
from flexengine.run.folder import check_disk, check_run_folder, started_run_folder
from flexengine.run.groups import steps_of
from flexengine.run.health import RunHealth, explain_divergence, where_not_finite
from flexengine.run.model_card import beside_export
from flexengine.run.objective_price import parts_lines, plan_with_room
from flexengine.run.opening import data_line, files_line, model_line, with_mode
from flexengine.run.ranks import as_rank, first_rank_first
from flexengine.run.recording import Recorder, check_recording
from flexengine.run.reference import add_reference
from flexengine.run.resuming import (
    ResumePoint,
    check_same_data,
    cut_logs,
    describe_resumption,
    load_point,
    resume_points,
    saved_date,
    seen_by_all,
)
from flexengine.run.saver import STOPPED, RunSaver
from flexengine.run.start_times import START
from flexengine.run.steps import Steps, check_objective, take_step
from flexengine.run.teacher import add_teacher
from flexengine.run.trackers import open_trackers
from flexengine.run.trades import trade_lines
from flexengine.run.training_data import TrainingData, check_sources, open_data
from flexengine.run.watchers import Watchers
from flexengine.runtime.engine import Engine
from flexengine.runtime.not_finite import NotFiniteError
from flexengine.runtime.weights.training_state import check_same_training, training_of

Prompts = Sequence[str] | Mapping[str, str]
"""Messages to answer at the end of a run, or these with the answers that are right."""
DIVERGED = 1
"""Exit status of a run whose model is not worth keeping."""
DATA_NOT_COUNTED = (
    "not in this plan: the host memory that reading the data takes. A run reads its data first, counts what that took"
    " as part of the process, and plans with it"
)
"""What a dry run, which reads no data, says of its host memory."""


def train(config: TrainConfig, prompts: Prompts = (), replace: bool = False, callbacks: Sequence[Callback] = ()) -> int:
    """Run one training from config to the exported model; returns the exit status.

    prompts are answered greedily at the end and printed, and where they map to the right answers, these are counted.
    replace allows a run folder whose final/ belongs to another config. callbacks are told of steps, evaluations and
    saves; of several ranks, those of the first.
    Writes config.yaml, plan.json, timeline.json (the simulated step: first round, accumulating round, update; for
    Perfetto), train_log.jsonl, with validation data eval_log.jsonl, with config.trace trace.json (a measured step in
    the same format) and, with config.save, final/ (and best/, of the lowest validation loss) in config.run_folder.
    Raises ValueError (PlanError when no plan fits) for what a person can correct, before any step is taken.
    """
    config, team = config.with_data(), join()
    check_gpus(config, 1 if team is None else team.ranks.local_size)
    with READY, contextlib.nullcontext() if config.dry_run else run_output():
        if team is None:
            return _train(config, prompts, replace, callbacks, None)
        with as_rank(team, config) as own:
            return _train(own, prompts, replace, callbacks, team)


def _train(
    config: TrainConfig, prompts: Prompts, replace: bool, callbacks: Sequence[Callback], team: Team | None
) -> int:
    config = with_mode(config, team)
    source = first_rank_first(team, lambda: open_source(config.model, config, not config.dry_run))
    print(model_line(config, source), flush=True)
    check_objective(config, source.spec)
    if config.dry_run:
        told_by_first(team, lambda: check_sources(config))
        return dry_run(config)
    told = Callbacks([*open_trackers(config.report_to), *callbacks] if is_first(team) else ())
    dated = dataclasses.replace(config, template_date=told_by_first(team, lambda: date_of_run(config)))
    checked = first_rank_first(team, lambda: check_run(dated, source))
    print(data_line(config, checked.data.description, checked.schedule.num_steps, is_demo=replace), flush=True)
    if checked.data.writes_date:
        config = dated  # the run keeps its day, for those that resume it
    elif config.template_date is not None:
        print(f"--template-date {config.template_date}: the chat template writes no date", file=sys.stderr)
    points = seen_by_all(team, lambda: check_folder(config, source, checked, replace))
    add_teacher(config, source, checked.data, team)
    checked.data.batches.begin(points[0].step if points else 0)
    planned = prepare_run(points[0].pinned(config) if points else config)
    told_of_plan = [planned.brief(), *trade_lines(config, planned), *parts_lines(config, planned)]
    print("\n".join([*told_of_plan, files_line(config)]), flush=True)
    if config.verbose:
        print("\n".join([*checked.data.details, planned.describe()]), flush=True)
    with started_run_folder(config, planned, checked.data.records, replace), told:
        return told.ending_with(run(config, planned, checked.data, checked.schedule, prompts, told, points))


def date_of_run(config: TrainConfig) -> str | None:
    """Find the day that chat templates see: the given one, that of the run which goes on, or today.

    None where no template is rendered.
    """
    if config.data_source == "synthetic":
        return None
    return config.template_date or saved_date(config) or today().isoformat()


class CheckedRun(NamedTuple):
    """What is known of a run before the machine is measured."""

    data: TrainingData
    schedule: LrSchedule


def check_run(config: TrainConfig, source: ModelSource) -> CheckedRun:
    """Open the data and check what can be checked before anything is planned. Raises: ValueError."""
    data = open_data(config, source)
    num_steps = data.batches.num_steps(config.steps, config.epochs)
    schedule = schedule_of(config, num_steps)
    check_recording(config, num_steps)
    return CheckedRun(data, schedule)


def check_folder(config: TrainConfig, source: ModelSource, run: CheckedRun, replace: bool) -> list[ResumePoint]:
    """Check the run folder; returns the checkpoints to go on from, the best first. Raises: ValueError."""
    check_run_folder(config, replace)
    if config.makes_checkpoints:
        check_disk(config, source)
    points = resume_points(config)
    if points:
        wanted = training_of(optimizer_of(config), points[0].pinned(config).numerics, config.seed)
        check_same_training(points[0].engine, points[0].checkpoint.folder, wanted)
        check_same_data(points[0], run.data, run.schedule.num_steps)
    return points


def run(
    config: TrainConfig,
    planned: PlannedRun,
    data: TrainingData,
    schedule: LrSchedule,
    prompts: Prompts,
    callbacks: Callbacks,
    points: list[ResumePoint],
) -> int:
    """Load the model, take all steps that are left, judge and export the model; returns the exit status."""
    if data.tokenizer is not None and not (prompts or config.sample_prompts or data.rewards):
        data.tokenizer.close()  # it has read the data, and nobody asks for answers
    engine, num_steps = build_engine(config, planned), schedule.num_steps
    add_reference(config, engine, data, planned.team)
    point = load_point(engine, points) if points else None
    if config.makes_checkpoints:
        engine.made_from["data"] = data.digests()
    with contextlib.ExitStack() as logs:
        watchers = watchers_of(config, planned, data, engine, num_steps, callbacks, logs, point)
        log = logs.enter_context(JsonlWriter(config.log_path(LOG_FILE), append=point is not None))
        callbacks.on_start(dataclasses.asdict(config), num_steps, config.run_folder)
        with watchers.saver.signals, watchers.saver.saving_first():
            status = take_steps_and_export(config, data, engine, schedule, log, watchers, point)
    if status == 0:
        asked = (*prompts, *(() if config.validates else config.sample_prompts))
        show_samples(engine, data.tokenizer, asked, prompts if isinstance(prompts, Mapping) else {})
    return status


def take_steps_and_export(
    config: TrainConfig,
    data: TrainingData,
    engine: Engine,
    schedule: LrSchedule,
    log: JsonlWriter,
    watchers: Watchers,
    point: ResumePoint | None,
) -> int:
    """Take the steps after `point`, judge the model and export it; returns the exit status."""
    start, show = 0 if point is None else point.step, config.logging != "warning"
    steps, interrupted = run_steps(engine, data.batches, schedule, log, show, watchers, start)
    recorder, evaluator, saver = watchers.recorder, watchers.evaluator, watchers.saver
    print(summary(engine, steps, [step for step in steps if not recorder.disturbed(step.step)]))
    if evaluator is not None and evaluator.best_step:
        print(evaluator.describe())
    last_step = steps[-1].step if steps else start
    if interrupted:
        print(saver.describe_stop(last_step), file=sys.stderr)
        return stop_status(saver, last_step)
    if steps and not is_worth_keeping(config, watchers.health, steps[-1]):
        return DIVERGED
    if config.save:
        final = config.run_folder / FINAL_FOLDER
        if not export(config, engine, data.tokenizer, last_step, final):
            return DIVERGED
        watchers.callbacks.on_save(final, last_step)
    return 0


def stop_status(saver: RunSaver, last_step: int) -> int:
    """Choose the exit status of a run that was stopped: STOPPED where a scheduler asked and nothing is lost."""
    received = saver.stop_signal
    if received in (None, signal.SIGINT):
        return INTERRUPTED
    return STOPPED if saver.saved_step == last_step else 128 + received


# ---- before the engine ----------------------------------------------------------------------------------------


def prepare_run(config: TrainConfig) -> PlannedRun:
    """Measure the machine and plan; loads no weights. Raises PlanError when nothing fits."""
    asked = {"whole_steps": True} if config.dry_run else {"whole_steps": True, "searching": begin_compiler}
    return plan_with_room(config, lambda **how: prepare_job(config.model, config.as_job(), **asked, **how))


def optimizer_of(config: TrainConfig) -> Optimizer:
    """Make the optimizer that the options ask for."""
    lr, decay = config.base_lr, config.weight_decay
    if config.optimizer in ("adamw", "muon"):
        kind = AdamW if config.optimizer == "adamw" else Muon
        b1, b2, eps = map(_given, (config.adam_beta1, config.adam_beta2, config.adam_eps), (*kind.betas, kind.eps))
        return kind(lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    return OPTIMIZERS[config.optimizer](lr=lr, weight_decay=decay)


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def schedule_of(config: TrainConfig, num_steps: int) -> LrSchedule:
    """Make the learning-rate schedule that the options ask for."""
    return LrSchedule(
        config.base_lr,
        num_steps,
        config.warmup_pct,
        config.cooldown_start_pct,
        config.lr_final_pct,
        config.lr_schedule,
        config.lr_warmup_steps,
    )


@START.part("load")
def build_engine(config: TrainConfig, planned: PlannedRun) -> Engine:
    """Load the weights of a planned run, and have its kernels compiled meanwhile."""
    return built_with_kernels(config.model, planned, optimizer_of(config))


def check_gpus(config: TrainConfig, ranks: int) -> None:
    """Raise ValueError unless as many processes of this machine take part as --gpus names, if it names several."""
    if config.gpus not in (1, ranks):
        raise ValueError(
            f"--gpus {config.gpus}, but {ranks} of this machine's processes train: `flexengine train` and `demo` start"
            " one for each GPU; under torchrun give --nproc-per-node, and leave --gpus out"
        )


def dry_run(config: TrainConfig) -> int:
    """Print the plan and write it where --plan-json says; data and the run folder are left alone."""
    planned = prepare_run(config)
    print("\n".join([planned.describe(), *parts_lines(config, planned)]))
    if config.data_source == "json_sft":
        print(DATA_NOT_COUNTED)
    if config.plan_json:
        write_text(Path(config.plan_json), planned.plan.to_json())
    return 0


# ---- the steps ------------------------------------------------------------------------------------------------


def watchers_of(
    config: TrainConfig,
    planned: PlannedRun,
    data: TrainingData,
    engine: Engine,
    num_steps: int,
    callbacks: Callbacks,
    logs: contextlib.ExitStack,
    point: ResumePoint | None = None,
) -> Watchers:
    """Make those who stand around every step. logs: closes what they leave open. point: what the run goes on from."""
    recorder = Recorder(config, planned, engine, num_steps, 0 if point is None else point.step)
    reviewer = Reviewer(config, planned, engine, num_steps, recorder)
    saver = RunSaver(config, engine, data.batches, num_steps, planned.team)
    steps = steps_of(config, planned, engine, data, logs)
    health = RunHealth(engine, steps, config.max_skipped_steps)
    card = StepCard(engine.device, planned.profile.matmul.sm_clock_mhz)
    watchers = Watchers(recorder, reviewer, health, callbacks, saver, steps, card, team=planned.team)
    saver.parts, saver.tell = {"health": health}, callbacks.on_save
    if point is not None:
        cut_logs(config.run_folder, point)
    if data.validation is not None:
        evaluator = watchers.evaluator = evaluator_of(config, data, engine, num_steps, callbacks, logs, point, steps)
        saver.parts["evaluation"] = evaluator
    if point is not None:
        saver.restore(point)
        print(describe_resumption(point, config, num_steps, engine.plan.request))
    return watchers


def evaluator_of(
    config: TrainConfig,
    data: TrainingData,
    engine: Engine,
    num_steps: int,
    callbacks: Callbacks,
    logs: contextlib.ExitStack,
    point: ResumePoint | None,
    steps: Steps,
) -> Evaluator:
    """Make the evaluator of the validation data, which keeps the best model."""
    assert data.validation is not None

    def keep_best(step: int) -> None:
        folder = config.run_folder / BEST_FOLDER
        if config.save and export(config, engine, data.tokenizer, step, folder):
            callbacks.on_save(folder, step)

    def tell(metrics: EvalMetrics) -> None:
        show_samples(engine, data.tokenizer, config.sample_prompts)
        callbacks.on_eval(metrics)

    log = logs.enter_context(JsonlWriter(config.log_path(EVAL_LOG_FILE), append=point is not None))
    actions = EvaluatorActions(log, tell, keep_best)
    every = config.eval_steps or max(1, num_steps // EVALUATIONS)
    return Evaluator(engine, data.validation, every, config.early_stopping_patience, actions, steps)


def run_steps(
    engine: Engine,
    batches: GlobalBatches | SyntheticBatches,
    schedule: LrSchedule,
    log: JsonlWriter,
    show: bool,
    watchers: Watchers,
    start: int = 0,
) -> tuple[list[StepMetrics], bool]:
    """Take the steps after `start`, each logged when it ends; returns them, and whether a signal cut them short.

    On a terminal a progress bar shows the last step; elsewhere every step is a line. show=False prints neither.
    The watchers stand around every step and may end the steps early. KeyboardInterrupt ends them at once.
    """
    num_steps, done = schedule.num_steps, []
    on_terminal = sys.stderr.isatty() and sys.stdout.isatty()
    width, pace = shutil.get_terminal_size().columns, Pace()  # 80 where the terminal reports 0
    bar = tqdm(total=num_steps, initial=start, unit="step", ncols=width, disable=not (show and on_terminal))
    try:
        for index, batch in enumerate(batches.batches(num_steps, start), start=start):
            watchers.before_step(index + 1)
            expected = watchers.reviewer.predict(batch)
            around = (expected, watchers.steps, watchers.card)
            metrics, update = take_step(engine, batch, index + 1, schedule.at(index), *around)
            log.write(metrics)
            done.append(metrics)
            if show and bar.disable:
                left_s = pace.left_s(num_steps - metrics.step, metrics.predicted_step_s)
                print(metrics.describe(num_steps, left_s), flush=True)
            bar.set_postfix_str(metrics.describe_shortly(), refresh=False)
            bar.update()
            show_evaluation(watchers.after_step(batch, metrics, update), show)
            if watchers.must_end:
                break
        last_step = start + len(done)
        show_evaluation(watchers.finish(last_step), show)
    except KeyboardInterrupt:
        watchers.saver.abandon()
        if watchers.team is not None:
            raise  # the other ranks wait for this one, so it tells them
        return done, True
    finally:
        watchers.close()
        bar.close()
    return done, watchers.saver.stopped and last_step < num_steps


def show_evaluation(metrics: EvalMetrics | None, show: bool) -> None:
    """Print an evaluation, if there was one; above the progress bar where there is a bar."""
    if metrics is not None and show:
        tqdm.write(metrics.describe())
        sys.stdout.flush()


# ---- after the steps ------------------------------------------------------------------------------------------


def is_worth_keeping(config: TrainConfig, health: RunHealth, last: StepMetrics) -> bool:
    """Judge the model after the last step; says why when it is not worth an export, and which steps were bad."""
    if health.diverged():
        print(explain_divergence(health, last, where_not_finite(health.engine)), file=sys.stderr)
        if config.save:
            print("  the model was not exported", file=sys.stderr)
        return False
    if health.bad_steps:
        print(health.describe())
    return True


def export(
    config: TrainConfig, engine: Engine, tokenizer: TokenizerProcess | None, num_steps: int, folder: Path
) -> bool:
    """Write the model to a folder with a record of its run; returns False, with a message, unless it is finite."""
    try:
        beside = {} if tokenizer is None else tokenizer.own_files()
        engine.save_pretrained(folder, beside={**beside, **beside_export(config, engine.made_from, num_steps)})
    except NotFiniteError as error:
        print(error, file=sys.stderr)
        return False
    tqdm.write(f"model: {folder}")
    return True
