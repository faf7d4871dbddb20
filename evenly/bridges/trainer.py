"""The job of a transformers `Trainer` (or trl's `SFTTrainer`): its model, arguments, data, loss, metrics and callbacks.

The Trainer is asked for what it would use itself (`get_train_dataloader`, `compute_loss`, `create_scheduler`), as if it
were to train in one process; its own loop does not run. What has no counterpart is refused by name; what does not
change the numbers of training (where it logs, how it saves) is left to `evenly run`, with a warning where it was asked.
"""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenly.bridges.callbacks import callback_problems, follows_loss, hooks_of_callbacks
from evenly.bridges.parameters import rebuilt_optimizer, rebuilt_schedule
from evenly.bridges.predictions import padded_arrays, samples_of
from evenly.bridges.sampling import order_of, order_problems
from evenly.errors import UserError
from evenly.job import Job, Loss, Precision

if TYPE_CHECKING:
    from transformers import Trainer

# Methods of a Trainer that stand for the loop which does not run, or for what is asked of it otherwise.
LOOP = ("train", "training_step", "prediction_step", "evaluation_loop", "create_optimizer")
LIBRARIES = ("transformers", "trl")


def from_trainer(trainer: Trainer) -> Job:
    """The job that `trainer.train()` would train in one process.

    A step's batch is `per_device_train_batch_size` x `gradient_accumulation_steps` samples, in microbatches of the
    former; the loss of a step is that of all its tokens or samples, as the Trainer's own is. A model that the Trainer
    was given is copied; one of `model_init` is built on every rank under evenly's own random stream.

    Raises `UserError` that names everything which cannot be carried over.
    """
    args, loader = trainer.args, None if trainer.train_dataset is None else trainer.get_train_dataloader()
    problems = [*_problems(trainer), *callback_problems(trainer), *order_problems(loader)]
    if problems or loader is None:
        raise UserError(
            f"a job of this {type(trainer).__name__}", "; ".join(problems), "leave these out, or write the job by hand"
        )
    for note in _notes(trainer):
        warnings.warn(f"evenly.from_trainer: {note}", stacklevel=2)
    steps, per_epoch = _lengths(args, loader)
    order: Any = order_of(loader)
    hooks: Any = hooks_of_callbacks(trainer, steps=steps, per_epoch=per_epoch)
    return Job(
        name=type(_bare(trainer)).__name__,
        model=_model(trainer),
        loss=TrainerLoss(trainer),
        data=loader.dataset,
        collate=loader.collate_fn,
        global_batch=_batch(args),
        microbatch=args.per_device_train_batch_size,
        steps=steps,
        optimizer=_optimizer(trainer),
        schedule=_schedule(trainer, steps),
        clip_norm=args.max_grad_norm or None,
        eval_data=_eval_data(trainer),
        eval_every=_every(args.eval_strategy, args.eval_steps, steps, per_epoch),
        evaluate=_evaluate(trainer),
        save_every=_every(args.save_strategy, args.save_steps, steps, per_epoch),
        precision=_precision(trainer),
        seed=args.seed,
        **order,
        **hooks,
    )


def _batch(args: Any) -> int:
    """Samples of a step in one process with one device."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps


def _lengths(args: Any, loader: Any) -> tuple[int, int]:
    """Steps of the run and of an epoch; a stream's epoch is taken for the run, where nothing depends on its length."""
    if not hasattr(loader.dataset, "__len__"):
        return args.max_steps, args.max_steps
    per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch), per_epoch


class TrainerLoss:
    """The loss of a Trainer: a sum over what counts (tokens) where its model can sum, else a mean over samples."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._sums = trainer, bool(divides_by_items(trainer))
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        # The Trainer adds up what its microbatches give, and divides by their number where that is not scaled already.
        accumulated = trainer.args.gradient_accumulation_steps
        self._times = (1 if scaled else 1 / accumulated) if self._sums else (accumulated if scaled else 1)

    @property
    def adds_up(self) -> bool:
        """Whether a step's loss is the sum of the means of its microbatches, as the Trainer's own."""
        return self._times > 1

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Loss:
        """The `Loss` of a microbatch; in an evaluation with what `compute_metrics` needs."""
        from transformers.trainer_pt_utils import find_batch_size

        trainer, inputs = self._trainer, dict(batch)
        samples: int = find_batch_size(inputs) or 0
        labels = [inputs.get(name) for name in trainer.label_names]
        device = next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))
        count = _items(trainer, inputs) if self._sums else None
        # A model that is given the number of items sums over the tokens and divides by it.
        one: dict[str, Any] = {} if count is None else {"num_items_in_batch": torch.ones((), device=device)}
        predicts = trainer.compute_metrics is not None and not model.training
        found: Any = trainer.compute_loss(model, inputs, return_outputs=predicts, **one)
        loss, outputs = found if predicts else (found, None)
        times = self._times if model.training and "labels" in batch else 1
        total, weight = (loss * samples, samples) if count is None else (loss, count)
        if not predicts or any(label is None for label in labels):
            return Loss(total * times, weight)
        predicted = self._predictions(model, outputs, labels)
        return Loss(total * times, weight, outputs={"predictions": predicted, "labels": samples_of(_alone(labels))})

    def _predictions(self, model: nn.Module, outputs: Any, labels: list[Any]) -> Any:
        trainer = self._trainer
        ignored = getattr(_bare(trainer).config, "keys_to_ignore_at_inference", ["past_key_values"])
        named = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs[1:])
        logits = _alone([value for key, value in named if key != "loss" and key not in ignored])
        if trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, _alone(labels))
        return samples_of(logits)


def divides_by_items(trainer: Any) -> bool | None:
    """Whether the loss is a sum that is divided by the number of items (tokens) that it is given; None: unknown.

    It is read from the code: the Trainer asks the signature alone, and what takes the number may make no use of it.
    """
    if trainer.compute_loss_func is not None:
        return _uses_items(trainer.compute_loss_func)
    own = type(trainer).compute_loss
    if own.__module__.partition(".")[0] not in LIBRARIES and not (
        _uses_items(own) and "super" in own.__code__.co_names
    ):
        return _uses_items(own)
    if not trainer.model_accepts_loss_kwargs:
        return False
    if trainer.label_smoother is not None:
        return True
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(_base(trainer)).forward)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "loss" in ast.unparse(node.func)]
    given = any(keyword.arg in (None, "num_items_in_batch") for call in calls for keyword in call.keywords)
    return given if calls else None


def _uses_items(function: Any) -> bool | None:
    """Whether the code of a function reads `num_items_in_batch`, or all keywords that it is given; None: unknown."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS) :]
    named = {"num_items_in_batch", *(keywords[:1] if code.co_flags & inspect.CO_VARKEYWORDS else ())}
    return any(one.argval in named for one in dis.get_instructions(code) if isinstance(one.argval, str))


def _items(trainer: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if "labels" not in inputs:
        return None
    base = _base(trainer)
    causal = LOSS_MAPPING.get(str(getattr(base, "loss_type", ""))) is ForCausalLMLoss
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if causal and not base.config.is_encoder_decoder else inputs["labels"]
    return labels.ne(-100).sum()


def _base(trainer: Any) -> Any:
    model: Any = _bare(trainer)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _bare(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def _alone(values: Iterable[Any]) -> Any:
    found = tuple(values)
    return found[0] if len(found) == 1 else found


def _model(trainer: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        own: nn.Module = (
            copy.deepcopy(_bare(trainer)).cpu() if trainer.model_init is None else trainer.call_model_init()
        )
        own.train()  # as every step of a Trainer does, whatever was put into evaluation mode by hand
        return own

    return build


def _optimizer(trainer: Any) -> Callable[..., torch.optim.Optimizer]:
    """Groups with and without weight decay as `Trainer.create_optimizer` makes them, by names."""
    model, args = _bare(trainer), trainer.args
    if trainer.optimizer is not None:
        return rebuilt_optimizer(_plain_optimizer(trainer.optimizer), model)
    decayed = {*trainer.get_decay_parameter_names(model)}
    kind, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(args, model)

    def build(named_parameters: Iterator[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups: list[list[nn.Parameter]] = [[], []]
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                groups[name not in decayed].append(parameter)
        decays = (args.weight_decay, 0.0)
        return kind(
            [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)],
            **copy.deepcopy(options),
        )

    return build


def _plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _schedule(trainer: Any, steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    if trainer.lr_scheduler is not None:
        return rebuilt_schedule(trainer.lr_scheduler)

    def build(optimizer: torch.optim.Optimizer) -> Any:
        trainer.lr_scheduler = None
        try:
            return trainer.create_scheduler(steps, optimizer)
        finally:
            trainer.lr_scheduler = None

    return build


def _eval_data(trainer: Any) -> Any:
    data = trainer.eval_dataset
    if data is None or trainer.args.eval_strategy == "no":
        return None
    if isinstance(data, Mapping):
        return {name: trainer.get_eval_dataloader(name).dataset for name in data}
    return trainer.get_eval_dataloader().dataset


def _evaluate(trainer: Any) -> Callable[[Any], Mapping[str, float]] | None:
    compute = trainer.compute_metrics
    if compute is None or _eval_data(trainer) is None:
        return None

    def evaluate(outputs: Any) -> Mapping[str, float]:
        from transformers import EvalPrediction

        predicted, labels = (padded_arrays(outputs[key]) for key in ("predictions", "labels"))
        found = compute(EvalPrediction(predictions=predicted, label_ids=labels))
        return {name: float(value) for name, value in found.items()}

    return evaluate


def _every(strategy: str, every: float | None, steps: int, per_epoch: int) -> int | None:
    """Steps between two; a Trainer takes a number below 1 as a share of all steps."""
    if strategy == "epoch":
        return per_epoch
    if strategy != "steps" or not every:
        return None
    return math.ceil(steps * every) if every < 1 else int(every)


def _precision(trainer: Any) -> Precision:
    if trainer.args.bf16 or trainer.args.fp16:
        return "bfloat16" if trainer.args.bf16 else "float16"
    types = {p.dtype for p in _bare(trainer).parameters() if p.is_floating_point()}
    pure: dict[torch.dtype, Precision] = {torch.bfloat16: "pure-bfloat16", torch.float16: "pure-float16"}
    pure[torch.float64] = "float64"
    return pure.get(types.pop(), "float32") if len(types) == 1 else "float32"


def _problems(trainer: Any) -> Iterator[str]:
    args = trainer.args
    inputs = [name for name in dir(trainer) if "prepare_input" in name or name == "get_batch_samples"]
    for method in (*LOOP, *inputs):
        owner = next(kind for kind in type(trainer).__mro__ if method in vars(kind))
        if owner.__module__.partition(".")[0] not in (LIBRARIES[:1] if method in inputs else LIBRARIES):
            makes = " (which makes the loss's inputs, generates samples, say)" if method in inputs else ""
            yield f"its class {owner.__name__} has a {method} of its own{makes}, and that loop does not run"
    if trainer.train_dataset is None:
        yield "it has no train_dataset"
    elif not hasattr(trainer.train_dataset, "__len__"):
        if args.max_steps <= 0:
            yield "its train_dataset is a stream, and max_steps does not say how many steps there are"
        if epochs := [name for name in ("eval_strategy", "save_strategy") if getattr(args, name) == "epoch"]:
            yield f"its {', '.join(epochs)} is epoch, and its train_dataset a stream, whose length is not known"
    if trainer.accelerator.num_processes > 1:
        yield (
            f"accelerate has connected {trainer.accelerator.num_processes} processes by itself: make the Trainer in a "
            "job file, where it finds none, and not in a script that runs its own loop"
        )
    if trainer.state.global_step:
        yield f"it has trained {trainer.state.global_step} steps already, and its optimizer's state would be lost"
    if divides_by_items(trainer) is None:
        yield "whether its loss divides by num_items_in_batch cannot be read from its code"
    yield from _optimizer_problems(trainer)
    wanted = {
        "deepspeed": bool(args.deepspeed),
        "fsdp": bool(args.fsdp),
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,
        "batch_eval_metrics": args.batch_eval_metrics,
        "include_for_metrics": bool(args.include_for_metrics),
        "train_sampling_strategy": args.train_sampling_strategy == "batch_rebalance",
        "parallelism_config": getattr(args, "parallelism_config", None) is not None,
    }
    yield from (f"its argument {name}={getattr(args, name)!r}" for name, given in wanted.items() if given)
    data: Any = trainer.train_dataset
    if args.dataloader_drop_last and hasattr(data, "__len__") and len(data) % _batch(args):
        yield "its argument dataloader_drop_last: every sample is trained on"


def _optimizer_problems(trainer: Any) -> Iterator[str]:
    from transformers.trainer_optimizer import is_optimizer_factory

    args = trainer.args
    if trainer.optimizer is not None and not _is_rebuildable(trainer):
        yield "its optimizer holds parameters that are not the model's"
    schedule = trainer.lr_scheduler
    if schedule is not None and not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        yield f"its lr_scheduler, a {type(schedule).__name__} that was made for another optimizer"
    if args.lr_scheduler_type == "reduce_lr_on_plateau" and not follows_loss(args):
        yield f"its lr_scheduler_type follows {args.metric_for_best_model}, and not the evaluation loss"
    if trainer.optimizer is None:
        kind, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(args, _bare(trainer))
        if is_optimizer_factory(kind) or {"params", "model", "optimizer_dict"} & {*options}:
            yield f"its optim={str(args.optim)!r}, which is made of the model itself"


def _is_rebuildable(trainer: Any) -> bool:
    known = {*map(id, _bare(trainer).parameters())}
    groups = _plain_optimizer(trainer.optimizer).param_groups
    return all(id(parameter) in known for group in groups for parameter in group["params"])


def _notes(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if args.gradient_checkpointing or getattr(args, "activation_checkpointing", False):
        yield "activation checkpointing is part of the plan here: add recompute=full to it"
    if TrainerLoss(trainer).adds_up:
        yield (
            f"the loss of a {type(_bare(trainer)).__name__} is a mean, of which the Trainer adds up "
            f"{args.gradient_accumulation_steps} in a step: it is that many times the mean, here too"
        )
    averaged = args.gradient_accumulation_steps > 1 and not divides_by_items(trainer)
    data: Any = trainer.train_dataset
    if averaged and hasattr(data, "__len__") and len(data) % _batch(args):
        yield "the last step of an epoch is short: its mean is over samples here, there over microbatches"
    if _eval_data(trainer) is not None:
        yield from _evaluation_notes(trainer)
    if args.torch_compile:
        yield "torch_compile is part of the plan here: add compile=blocks to it"
    if args.load_best_model_at_end:
        yield "load_best_model_at_end: the best checkpoint is kept, and `evenly export --step best` writes it"
    if args.push_to_hub:
        yield "push_to_hub: nothing is uploaded; `evenly export` writes a folder that can be"


def _evaluation_notes(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if divides_by_items(trainer):
        yield (
            "the loss of an evaluation is that of all its tokens; the Trainer averages the means of its batches, in "
            "which tokens of batches with few of them count for more"
        )
    elif not _batches_alike(trainer):
        yield (
            f"an evaluation runs up to {args.per_device_train_batch_size} samples at a time, in parts of like sizes, "
            f"and the Trainer {args.per_device_eval_batch_size}: a loss that is no mean over samples (one over tokens, "
            "say) is another"
        )


def _batches_alike(trainer: Any) -> bool:
    size, data = trainer.args.per_device_eval_batch_size, trainer.eval_dataset
    sets = data.values() if isinstance(data, Mapping) else [data]
    return size == trainer.args.per_device_train_batch_size and not any(
        len(one) % size if hasattr(one, "__len__") else True for one in sets
    )
