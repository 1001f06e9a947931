"""What an engine remembers between calls: gradients since the last step, steps taken, whether it can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from flexengine.optim.loss_scale import LossScale
from flexengine.runtime.execution.executor import Executor

HALF_UPDATED = "an optimizer step was interrupted, so its weights are half updated"


def nobody_reads() -> None:
    """Stored weights and optimizer states may change at any time."""


def _nobody_waits(error: BaseException) -> None:
    """No other rank waits for this one."""


class StepState:
    """Gradients and interruptions of one engine.

    loss_weight: target tokens since the last step, or the sum of their weights' sizes: what the stored gradients, which
    are sums, are divided by. num_rounds: rounds of training since then. unusable: why the engine cannot go on; empty
    while it can. merged: adapters are in the weights, so that nothing may be trained or saved. under_way: a call
    changes the gradients; what it leaves is dropped unless it ends by clearing this. bad_layer: whose gradient made the
    last step skip its update; empty when none did. running: the call that runs, under the key "call"; empty while none
    does. loss_scale: of float16 gradients; None in other dtypes. grad_factor: what stored gradients are multiplied by.
    before_update: called before stored weights or states change; it blocks while somebody reads them. on_failure:
    called with what interrupted a call, before the device is waited for.
    """

    def __init__(self, loss_scale: LossScale | None = None) -> None:
        self.step_count = 0
        self.loss_scale, self.grad_factor = loss_scale, 1.0
        self.unusable = ""
        self.merged = False
        self.under_way = False
        self.bad_layer = ""
        self.running: dict[str, object] = {}
        self.before_update: Callable[[], None] = nobody_reads
        self.on_failure: Callable[[BaseException], None] = _nobody_waits
        self.start_accumulation()

    def start_accumulation(self) -> None:
        """Forget all gradients: nothing is stored for the next step."""
        self.forget_gradients()
        self.started_s = 0.0

    def forget_gradients(self) -> None:
        """Have the step under way begin once more, while its clock goes on."""
        self.loss_weight: float = 0
        self.has_gradients = False
        self.num_rounds = 0

    def drop_interrupted(self) -> None:
        """Forget the gradients if the training call before this one did not come to its end."""
        if self.under_way:
            self.start_accumulation()
            self.under_way = False

    def start_step(self) -> bool:
        """Note when a step begins. Returns False when an earlier call has begun it."""
        self.require_usable()
        if self.has_gradients:
            return False
        self.started_s = time.perf_counter()
        return True

    def scale_gradients(self, loss_weight: float) -> None:
        """Choose the factor of a step's gradients where this batch, of such a weight, is the step's first."""
        if self.loss_scale is not None and not self.has_gradients:
            self.grad_factor = self.loss_scale.factor(loss_weight)

    def finish_step(self, counts: bool, finite: bool = True) -> tuple[float, float | None]:
        """End a step; returns its seconds and loss scale. counts: whether AdamW's bias correction counts it."""
        self.step_count += counts
        seconds, scale = time.perf_counter() - self.started_s, None
        if self.loss_scale is not None:
            scale = self.loss_scale.scale
            self.loss_scale.end_step(finite)
        self.start_accumulation()
        self.unusable = ""  # last: an interrupt up to here leaves an engine that refuses to go on
        return seconds, scale

    def require_usable(self, merged: bool = False) -> None:
        """Raise ValueError when an interruption or `close` ended the engine, or, unless `merged`, after `merge`."""
        if self.unusable:
            raise ValueError(f"this engine cannot go on: {self.unusable}; make a new one with from_pretrained")
        if self.merged and not merged:
            raise ValueError("the adapters are merged into the weights beneath; call unmerge() first")

    def require_stored(self, stored: bool) -> None:
        """Raise ValueError unless gradients are stored from call to call."""
        if not stored:
            raise ValueError(
                "this plan stores no gradients, as each step is one call: use train_step(batch), or plan with"
                " whole_steps=False, which takes more memory"
            )

    def require_gradients(self, message: str) -> None:
        """Raise ValueError with `message` unless gradients are stored in a usable engine."""
        self.require_usable()
        if not self.has_gradients:
            raise ValueError(message)


@contextmanager
def interruptible(state: StepState, executor: Executor, train: bool) -> Iterator[None]:
    """Run a call on the stream that computes; on an error or interrupt, wait until nothing runs any more.

    An interrupted training call drops all gradients since the last step, those of earlier whole calls too: some layers
    would hold this batch and others not.
    """
    if train:
        state.under_way = True
    try:
        with executor.on_compute_stream():
            yield
    except BaseException as error:
        state.on_failure(error)
        if train:
            state.start_accumulation()
        with suppress(RuntimeError):  # of the CPU's work, which awaits ranks that have been told of the first error
            executor.synchronize()
        raise
