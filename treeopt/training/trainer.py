"""One stage of a training, on transformers' Trainer: steps, checkpoints, resuming, logging, several processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from treeopt.errors import HeadsError, TargetError, first_line
from treeopt.progress import Progress
from treeopt.training.checkpoints import damaged, last_complete, note_complete

__all__ = ["Group", "Stage", "run_stage"]

BETAS = (0.9, 0.95)
CLIPPED_NORM = 1.0
SAVE_SPACING = 20  # times as long as a save took pass before the next,
SAVE_SECONDS = 10.0  # and so many seconds
MEASURE_SPACING = 20  # the same for measuring
LOGGED_STEPS = 100  # of a stage


@dataclass(frozen=True)
class Group:
    """Parameters that share a peak learning rate."""

    parameters: Sequence[nn.Parameter]
    learning_rate: float


@dataclass(frozen=True)
class Stage:
    """What one stage of a training is.

    Attributes
    ----------
    label : str
        For the progress bar.
    module : nn.Module
        Its forward takes an item of `items` and ``counts``, and gives ``loss``.
    groups : sequence of Group
    items : Dataset
        Passes in the order in which they are learnt.
    tokens : int
        Roughly, of all passes.
    accumulate : int
        Passes of one optimiser step.
    warmup_steps : int
    weight_decay : float
    mixed_precision : {'no', 'bf16', 'fp16'}
    seed : int
    report_to : str
    folder : Path
        For checkpoints.
    device : torch.device
    measure : callable
        Gives what is shown and logged of the state so far.
    advance : callable
        Is told before each step how much of the training is done, in [0, 1].
    """

    label: str
    module: nn.Module
    groups: Sequence[Group]
    items: Dataset[dict[str, Tensor]]
    tokens: int
    accumulate: int
    warmup_steps: int
    weight_decay: float
    mixed_precision: str
    seed: int
    report_to: str
    folder: Path
    device: torch.device
    measure: Callable[[], Any]
    advance: Callable[[float], None] = lambda progress: None


def run_stage(stage: Stage) -> list[dict[str, Any]]:
    """Train; go on from the last complete checkpoint in the stage's folder.

    Returns
    -------
    list of dict
        The log: losses, rates and what was measured, by step.

    Raises
    ------
    HeadsError
        If a checkpoint is damaged.
    """
    wrapped = _Trained(stage.module)
    arguments = _arguments(stage)
    _require_own_device(stage.device, arguments.device)
    num_passes = -(-len(stage.items) // arguments.world_size)  # type: ignore[arg-type]
    num_steps = -(-num_passes // stage.accumulate)
    optimizer = torch.optim.AdamW(
        [{"params": list(group.parameters), "lr": group.learning_rate} for group in stage.groups],
        lr=stage.groups[0].learning_rate, weight_decay=stage.weight_decay, betas=BETAS,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, _cosine(min(stage.warmup_steps, max(1, num_steps // 4)), num_steps)
    )
    arguments.logging_steps = max(1, num_steps // LOGGED_STEPS)
    talk = _Talk(stage, num_steps)
    trainer = _Trainer(
        model=wrapped, args=arguments, train_dataset=stage.items, optimizers=(optimizer, schedule), callbacks=[talk]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.model_accepts_loss_kwargs = True  # losses come divided by what a whole step counts
    checkpoint = last_complete(stage.folder, arguments)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except Exception as error:  # reading a checkpoint has no common error
        if checkpoint is None or talk.begun:
            raise
        raise damaged(checkpoint, first_line(error)) from error
    finally:
        talk.close()
    if not all(bool(parameter.isfinite().all()) for group in stage.groups for parameter in group.parameters):
        raise HeadsError(
            f"{stage.label} diverged: parameters are not finite; delete `{stage.folder.parent}` and give a smaller rate"
        )
    return [entry for entry in trainer.state.log_history if "train_runtime" not in entry]


class _Trained(nn.Module):
    """A module whose saved state is what is trained of it."""

    # Trainer neither moves such a module nor spreads batches over the devices of one process.
    is_parallelizable, model_parallel = True, True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        return self.module(**inputs)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        own = self.state_dict()
        if {n: v.shape for n, v in own.items()} != {n: v.shape for n, v in state_dict.items()}:
            raise HeadsError("the checkpoint holds other parameters than are trained")
        for name, value in state_dict.items():
            own[name].copy_(value)
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])


class _Trainer(Trainer):  # type: ignore[misc]
    """Passes in their own order, and sums of losses divided by what all passes of a step count."""

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(
            self.train_dataset,
            batch_size=1, sampler=SequentialSampler(self.train_dataset), collate_fn=_only,
        )  # fmt: skip
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *_: Any) -> tuple[list[Any], Any]:
        passes = [item for _, item in zip(range(num_batches), epoch_iterator)]
        if not passes:
            return [], None
        counts = torch.stack([(item["labels"] >= 0).sum(0) for item in passes]).sum(0).float()
        # Gradients are averaged over processes, so each divides by the mean count.
        counts = self.accelerator.reduce(counts, "mean")
        return [{**item, "counts": counts} for item in passes], int(counts.sum())

    def _load_rng_state(self, checkpoint: Any) -> None:
        try:  # Trainer reads this part last, behind the beginning
            super()._load_rng_state(checkpoint)
        except Exception as error:
            raise damaged(checkpoint, first_line(error)) from error

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        loss: Tensor = model(**inputs)["loss"]
        return loss


def _only(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return items[0]


def _arguments(stage: Stage) -> TrainingArguments:
    on_cpu = stage.device.type == "cpu"
    return TrainingArguments(
        output_dir=str(stage.folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=stage.accumulate,
        num_train_epochs=1,
        max_grad_norm=CLIPPED_NORM,
        bf16=stage.mixed_precision == "bf16",
        fp16=stage.mixed_precision == "fp16",
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and torch.distributed.is_initialized() else None,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,
        logging_strategy="steps",
        save_strategy="no",  # the callback says when: as often as its time allows
        save_total_limit=2,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=stage.report_to,
        seed=stage.seed,
    )


def _require_own_device(given: torch.device, chosen: torch.device) -> None:
    """Refuse a CUDA device that is not the one which Trainer takes."""
    if given.type == "cuda" and (given.index or 0) != (chosen.index or 0):
        raise TargetError(
            f"training takes {chosen} and the target is on {given}; hide the other devices with "
            f"CUDA_VISIBLE_DEVICES={given.index} instead of --device"
        )


class _Talk(TrainerCallback):  # type: ignore[misc]
    """Progress, measuring and the times of saving."""

    def __init__(self, stage: Stage, num_steps: int) -> None:
        self._stage, self._num_steps = stage, num_steps
        self._bar: Progress | None = None
        self._note, self.begun = "", False
        self._saved = self._measured = time.monotonic()
        self._saving = self._saved
        self._save_seconds = self._measure_seconds = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.begun = True
        if state.is_world_process_zero:
            self._bar = Progress(self._stage.label, total=self._num_steps, done=state.global_step, unit="steps")
            if state.global_step == 0:
                self._measure(state)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._stage.advance(state.global_step / self._num_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        last = state.global_step >= self._num_steps
        due = time.monotonic() - self._measured >= MEASURE_SPACING * self._measure_seconds
        if state.is_world_process_zero and (last or due):
            self._measure(state)
        if self._bar is not None:
            self._bar.add(documents=1, tokens=self._stage.tokens // self._num_steps, note=self._note)
        control.should_save = self._save_is_due(args) or last

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            note_complete(self._stage.folder / f"checkpoint-{state.global_step}")
        self._save_seconds = time.monotonic() - self._saving
        self._saved = time.monotonic()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)

    def _save_is_due(self, args: TrainingArguments) -> bool:
        self._saving = time.monotonic()
        due = torch.tensor(float(self._saving - self._saved >= max(SAVE_SECONDS, SAVE_SPACING * self._save_seconds)))
        if args.world_size > 1:  # clocks differ, and all must save alike
            due = due.to(args.device)
            torch.distributed.broadcast(due, 0)
        return bool(due)

    def _measure(self, state: TrainerState) -> None:
        start = time.monotonic()
        self._stage.module.eval()
        found = self._stage.measure()
        self._stage.module.train()
        self._note = str(found)
        state.log_history.append({"step": state.global_step, **found.log()})
        self._measured = time.monotonic()
        self._measure_seconds = self._measured - start


def _cosine(warmup: int, total: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    return factor
