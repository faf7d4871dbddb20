"""The job of a LightningModule with automatic optimization, and of its data.

`training_step` is the loss, `configure_optimizers` the optimizer and the schedule, `validation_step` the evaluation,
and what they log are metrics, weighted by samples. Lightning's Trainer does not run: of the one that is given only its
settings count. What has no counterpart is refused by name.
"""

from __future__ import annotations

import copy
import dis
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from evenly.bridges.epochs import EveryEpoch
from evenly.data.generators import undisturbed, undisturbed_past_torch
from evenly.data.nest import tensors_in
from evenly.errors import UserError
from evenly.job import Job, Loss, Precision

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

PRECISIONS: dict[str, Precision] = {
    "32": "float32", "32-true": "float32", "64": "float64", "64-true": "float64", "16": "float16",
    "16-mixed": "float16", "bf16": "bfloat16", "bf16-mixed": "bfloat16", "bf16-true": "pure-bfloat16",
    "16-true": "pure-float16",
}  # fmt: skip
# What a module may not define, besides all that begins with on_: its Trainer alone would call it.
HOOKS = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping"),
    *("configure_callbacks", "configure_model", "transfer_batch_to_device"),
)
# What its steps may not ask for: there is no Trainer that knows it.
OF_A_TRAINER = ("trainer", "global_step", "current_epoch", "optimizers", "lr_schedulers", "manual_backward")


def from_lightning(
    module: LightningModule,
    data: LightningDataModule | DataLoader[Any] | None = None,
    trainer: Trainer | None = None,
    *,
    steps: int | None = None,
) -> Job:
    """Return the job that `trainer.fit(module, data)` would train.

    data:    a LightningDataModule, or a DataLoader for training; None: the module's own.
    trainer: its max_steps or max_epochs, accumulate_grad_batches, gradient_clip_val and precision count; and devices
             that were stated, of which each has one of the loader's batches in a step. A warning names their plan.
    steps:   of the run, where no trainer tells that.

    Raises `UserError` that names everything which cannot be carried over.
    """
    train, validation = _loaders(module, data)
    problems = [*_problems(module), *_trainer_problems(trainer), *_loader_problems(train, validation)]
    problems += [] if data is None or isinstance(data, DataLoader) else _hook_problems(data)
    problems += [] if problems or validation is None else _evaluation_problems(module, validation)
    if problems:
        asked = f"a job of the module {type(module).__name__}"
        raise UserError(asked, "; ".join(problems), "leave these out, or write the job by hand")
    accumulated = 1 if trainer is None else trainer.accumulate_grad_batches * _wished_devices(trainer)
    if accumulated > 1 and (devices := _wished_devices(trainer)) > 1:
        wish = f"the Trainer's devices={devices} and {type(trainer.strategy).__name__}"  # type: ignore[union-attr]
        plan = PLANS.get(type(trainer.strategy).__name__, "auto")  # type: ignore[union-attr]
        step = f"a step has {devices} batches of the loader's, on any number of devices"
        warnings.warn(f"evenly.from_lightning: {wish} are --devices {devices} --plan {plan} here; {step}", stacklevel=2)
    microbatch = int(train.batch_size or 1)
    per_epoch = math.ceil(len(train.dataset) / (microbatch * accumulated))  # type: ignore[arg-type]
    count = steps or _steps(trainer, per_epoch)
    optimizers = ModuleOptimizers(module, per_epoch)
    return Job(
        name=type(module).__name__,
        model=optimizers.build_model,
        loss=lightning_loss,
        data=train.dataset,
        collate=train.collate_fn,
        global_batch=microbatch * accumulated,
        microbatch=microbatch,
        steps=count,
        shuffle=not isinstance(train.sampler, SequentialSampler),
        optimizer=optimizers.build,
        schedule=optimizers.schedule if optimizers.has_schedule else None,
        clip_norm=None if trainer is None else trainer.gradient_clip_val,
        eval_data=None if validation is None else validation.dataset,
        eval_every=None if validation is None else per_epoch * _epochs_between_evaluations(trainer),
        save_every=per_epoch,
        precision="float32" if trainer is None else PRECISIONS[str(trainer.precision)],
    )


class LightningSteps(nn.Module):
    """A LightningModule whose forward is its step: that of training, or in evaluation that of validation."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def train(self, mode: bool = True) -> LightningSteps:
        """Set the mode, of the module for evaluation only: `Trainer.fit` leaves it in the mode that it has."""
        self.training = mode
        if not mode:
            self.module.eval()
        return self

    def forward(self, batch: Any) -> tuple[torch.Tensor | None, dict[str, tuple[torch.Tensor, float]]]:
        """The loss that the step returns, if any, and what it logs: by name a value, and the samples that it is of."""
        samples, logged = _samples(batch), dict[str, tuple[torch.Tensor, float]]()

        def log(
            name: str, value: Any, *_: Any, batch_size: int | None = None, reduce_fx: Any = "mean", **__: Any
        ) -> None:
            if reduce_fx not in ("mean", torch.mean):
                found = f"{name} is to be reduced by {reduce_fx}"
                raise UserError("the metrics that a step logs are means over samples", found, "log a mean")
            logged[name] = (torch.as_tensor(value).detach(), float(batch_size or samples))

        step = self.module.training_step if self.training else self.module.validation_step
        vars(self.module)["log"] = log
        try:
            found = step(batch, 0)
        finally:
            del vars(self.module)["log"]
        loss = found["loss"] if isinstance(found, Mapping) else found
        return loss, logged


def lightning_loss(model: nn.Module, batch: Any) -> Loss:
    """The `Loss` of `LightningSteps`: a mean over the microbatch's samples.

    Of a validation that returns none it is what that logs as a loss.
    """
    loss, logged = model(batch)
    samples = _samples(batch)
    if loss is None:
        names = [name for name in logged if "loss" in name]
        if not names:
            found = f"it logs {', '.join(logged) or 'nothing'}"
            raise UserError("evaluating by validation_step", f"it returns no loss, and {found}", "return the loss")
        loss = logged[names[0]][0]
    metrics = {name: (value * count, count) for name, (value, count) in logged.items()}
    return Loss(loss * samples, samples, metrics=metrics)


class ModuleOptimizers:
    """Optimizer and schedule of `configure_optimizers`, which is asked on the copy of the module that is trained."""

    def __init__(self, module: LightningModule, per_epoch: int) -> None:
        self._module, self._per_epoch = module, per_epoch
        self._built: list[weakref.ref[LightningSteps]] = []
        self._schedules: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        self.has_schedule = (schedule := _parts(module.configure_optimizers())[1]) is not None
        _check_schedule(schedule)

    def build_model(self) -> LightningSteps:
        """A copy of the module that may be trained."""
        built = LightningSteps(copy.deepcopy(self._module))
        self._built.append(weakref.ref(built))
        return built

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of the copy that has these parameters."""
        own = {*map(id, parameters)}
        alive = [built for reference in self._built if (built := reference()) is not None]
        for built in reversed(alive):
            if own & {*map(id, built.parameters())}:
                optimizer, schedule = _parts(built.module.configure_optimizers())
                # A schedule counts the steps of its optimizer by a wrapper, which it gets when it is asked for.
                self._schedules[optimizer] = schedule, vars(optimizer).pop("step", None)
                return optimizer
        raise UserError("the module's optimizer", "its parameters are of no module that was built", "report this")

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The schedule that was made with `optimizer`; one that counts epochs steps at their ends."""
        found, counted_step = self._schedules[optimizer]
        if counted_step is not None:
            vars(optimizer)["step"] = counted_step
        config = found if isinstance(found, Mapping) else {"scheduler": found}
        if config.get("interval", "epoch") == "step":
            return config["scheduler"]
        return EveryEpoch(config["scheduler"], self._per_epoch)


def _parts(configured: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The one optimizer, and its schedule or the configuration of it, of what `configure_optimizers` returns.

    Raises `UserError` for several of either.
    """
    schedules: Any = []
    if isinstance(configured, Mapping):
        configured, schedules = configured["optimizer"], configured.get("lr_scheduler", [])
    elif isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        configured, schedules = configured
    optimizers = [*configured] if isinstance(configured, list | tuple) else [configured]
    schedules = schedules if isinstance(schedules, list) else [schedules]
    if len(optimizers) != 1 or len(schedules) > 1:
        found = f"it returns {len(optimizers)} optimizers and {len(schedules)} schedules"
        raise UserError("the module's configure_optimizers", found, "a job of a module has one of each at most")
    return optimizers[0], schedules[0] if schedules else None


def _check_schedule(schedule: Any) -> None:
    """Raises `UserError` for a schedule that does not count steps or epochs one by one."""
    config = schedule if isinstance(schedule, Mapping) else {"scheduler": schedule}
    follows, every = isinstance(config["scheduler"], ReduceLROnPlateau), config.get("frequency", 1)
    if follows or every != 1:
        found = f"its {type(config['scheduler']).__name__} {'follows a metric' if follows else f'steps every {every}'}"
        raise UserError("the module's configure_optimizers", found, "use a schedule that counts steps or epochs")


def _loaders(
    module: LightningModule, data: LightningDataModule | DataLoader[Any] | None
) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    if isinstance(data, DataLoader):
        return data, None
    source: Any = module if data is None else data
    source.prepare_data()
    source.setup("fit")
    try:
        validation = source.val_dataloader()
    except Exception:  # Lightning's own, of a class that does not define it
        validation = None
    if isinstance(validation, list | tuple):
        found = f"val_dataloader returns {len(validation)} loaders"
        raise UserError("evaluating by validation_step", found, "return one")
    return source.train_dataloader(), validation


def _steps(trainer: Trainer | None, per_epoch: int) -> int:
    if trainer is not None and trainer.max_steps > 0:
        return trainer.max_steps
    if trainer is not None and trainer.max_epochs and trainer.max_epochs > 0:
        return trainer.max_epochs * per_epoch
    raise UserError("a job of a module", "nothing says how many steps it has", "give `steps`, or a Trainer with limits")


def _problems(module: LightningModule) -> Iterator[str]:
    from lightning.pytorch import LightningModule

    if not module.automatic_optimization:
        yield "automatic_optimization is False: its step updates by itself"
    yield from _hook_problems(module)
    for name in ("training_step", "validation_step"):
        step = getattr(type(module), name)
        if step is not getattr(LightningModule, name):
            yield from _step_problems(name, step)


def _hook_problems(source: LightningModule | LightningDataModule) -> Iterator[str]:
    base = next(one for one in type(source).__mro__ if one.__module__.startswith("lightning"))
    for name in (*HOOKS, *(name for name in dir(base) if name.startswith("on_"))):
        if getattr(type(source), name, None) is not getattr(base, name, None):
            yield f"{type(source).__name__} has a hook {name}, which only a Trainer calls"


def _evaluation_problems(module: LightningModule, validation: DataLoader[Any]) -> Iterator[str]:
    """Yield why the loss of the first validation batch cannot be told."""
    model = LightningSteps(copy.deepcopy(module)).eval()
    try:
        with torch.no_grad(), undisturbed(), undisturbed_past_torch():
            lightning_loss(model, next(iter(validation)))
    except UserError as problem:
        yield f"{problem.asked}: {problem.found}"
    except Exception:  # of a step that runs on a GPU alone, say: an evaluation says it
        return


# What a Lightning trainer has by itself, in whose place `evenly run` has its screen and its checkpoints.
OWN_CALLBACKS = (
    "LearningRateMonitor",
    "TQDMProgressBar",
    "RichProgressBar",
    "ModelSummary",
    "RichModelSummary",
    "ModelCheckpoint",
)
WHOLE_EPOCHS = {"limit_train_batches": 1.0, "overfit_batches": 0.0, "val_check_interval": 1.0}


def _trainer_problems(trainer: Any) -> Iterator[str]:
    if trainer is None:
        return
    if str(trainer.precision) not in PRECISIONS:
        yield f"the trainer's precision {trainer.precision}"
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        yield f"the trainer's gradient_clip_algorithm {trainer.gradient_clip_algorithm}"
    for name, whole in WHOLE_EPOCHS.items():
        if getattr(trainer, name) != whole:
            yield f"the trainer's {name}={getattr(trainer, name)}: epochs are whole"
    others = [type(callback).__name__ for callback in trainer.callbacks]
    if others := [name for name in others if name not in OWN_CALLBACKS]:
        yield f"the trainer's callbacks {', '.join(others)}"


PLANS = {"DDPStrategy": "ddp", "FSDPStrategy": "zero3", "DeepSpeedStrategy": "zero2", "ModelParallelStrategy": "tp"}


def _wished_devices(trainer: Any) -> int:
    """Return the devices that a Trainer was told to train on; 1 where it takes those that it finds."""
    if trainer is None or getattr(trainer._accelerator_connector, "_devices_flag", "auto") in ("auto", -1, "-1"):
        return 1
    return trainer.num_devices * trainer.num_nodes


def _epochs_between_evaluations(trainer: Any) -> int:
    return 1 if trainer is None else trainer.check_val_every_n_epoch or 1


def _step_problems(name: str, step: Callable[..., Any]) -> Iterator[str]:
    code = step.__code__
    if asked := [one for one in OF_A_TRAINER if one in code.co_names]:
        yield f"its {name} asks for {', '.join(asked)}"
    arguments = code.co_varnames[: code.co_argcount]
    if len(arguments) > 2 and any(one.argval == arguments[2] for one in dis.get_instructions(code)):
        yield f"its {name} makes use of {arguments[2]}, and microbatches have no number that every plan shares"


def _loader_problems(train: DataLoader[Any], validation: DataLoader[Any] | None) -> Iterator[str]:
    for loader in (train, *([] if validation is None else [validation])):
        batch: int = loader.batch_size or 1
        if loader.drop_last and len(loader.dataset) % batch:  # type: ignore[arg-type]
            yield "a DataLoader drops its last batch: every sample counts"
    sampler: Any = train.sampler
    if not isinstance(sampler, SequentialSampler | RandomSampler):
        yield f"its DataLoader has a {type(sampler).__name__}"
    elif isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(train.dataset)):  # type: ignore[arg-type]
        yield "its DataLoader draws samples with replacement, or not all of an epoch"
    if train.batch_size is None:
        yield "its DataLoader has batches of its own (batch_sampler)"
    if validation is not None and validation.collate_fn is not train.collate_fn:
        yield "the DataLoaders of training and validation have different collate_fns"


def _samples(batch: Any) -> int:
    return len(next(iter(tensors_in(batch))))
