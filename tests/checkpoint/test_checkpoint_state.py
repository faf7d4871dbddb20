from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as schedules

from evenly.checkpoint.manifest import differences, first_of
from evenly.checkpoint.plain import decode, encode
from evenly.checkpoint.state import check_values, install, read_state, targets
from evenly.checkpoint.writer import form_of
from evenly.errors import CheckpointError, ResumeError, UserError


def write_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """The inverse of `read_state`: into the model in place, into the optimizer as copies.

    Raises `ResumeError` if they are not of this model or this optimizer; then nothing was written.
    """
    check_values(model, optimizer, values)
    forms = {name: form_of(tensor) for name, tensor in tensors.items()}
    mine = targets(model, optimizer, forms)
    found = differences(forms, {name: form_of(tensor) for name, tensor in mine.items()})
    if found:
        raise ResumeError("taking up a state", first_of(found), "use the job that it was saved by")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
    install(model, optimizer, mine, values)


Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """A tied weight, a buffer that is kept, one that is not, and a frozen parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.to(dtype)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.body(self.embed(index)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    index = torch.randint(7, (5,), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(index).float(), index).backward()
    optimizer.step()


def trained(make: Make, steps: int = 3, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net(dtype)
    optimizer = make(model)
    for seed in range(steps):
        step(model, optimizer, seed)
    return model, optimizer


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return (tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def state_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors, values = read_state(model, optimizer)
    return {name: bits(tensor) for name, tensor in tensors.items()}, values


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.5}], betas=(0.8, 0.9))


def matrices_of(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.dim() == 2]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: optim.Adam(m.parameters(), amsgrad=True),
    "adamw-single": lambda m: optim.AdamW(m.parameters(), foreach=False),
    "adamw-foreach": lambda m: optim.AdamW(m.parameters(), foreach=True),
    "adamw-fused": lambda m: optim.AdamW(m.parameters(), fused=True),
    "adamw-groups": two_groups,
    "adamw-tensor-lr": lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), foreach=False),
    "adamax": lambda m: optim.Adamax(m.parameters()),
    "nadam": lambda m: optim.NAdam(m.parameters()),
    "radam": lambda m: optim.RAdam(m.parameters()),
    "rmsprop": lambda m: optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "rprop": lambda m: optim.Rprop(m.parameters()),
    "adagrad": lambda m: optim.Adagrad(m.parameters()),
    "adadelta": lambda m: optim.Adadelta(m.parameters()),
    "asgd": lambda m: optim.ASGD(m.parameters()),
    "adafactor": lambda m: optim.Adafactor(m.parameters()),
    "muon": lambda m: optim.Muon(matrices_of(m)),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_written_state_is_the_state_read_and_trains_on_alike(name: str, steps: int) -> None:
    make = OPTIMIZERS[name]
    model, optimizer = trained(make, steps)
    other_model, other = trained(make, steps=1)
    tensors, values = read_state(model, optimizer)
    write_state(other_model, other, tensors, decode(json.loads(json.dumps(encode(values, "values"), allow_nan=False))))
    assert state_bits(other_model, other) == state_bits(model, optimizer)
    for seed in (11, 12):
        step(model, optimizer, seed)
        step(other_model, other, seed)
    assert state_bits(other_model, other) == state_bits(model, optimizer)


def test_the_copies_do_not_share_memory() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    other_model, other = trained(OPTIMIZERS["adam"], steps=0)
    write_state(other_model, other, *read_state(model, optimizer))
    before = state_bits(model, optimizer)
    step(other_model, other, 5)
    assert state_bits(model, optimizer) == before


def test_names_are_parameter_names_and_tied_weights_come_once() -> None:
    model, optimizer = trained(lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    tensors, values = read_state(model, optimizer)
    assert [n for n in tensors if n.startswith("model.")] == [
        "model.frozen",
        "model.kept",
        "model.embed.weight",
        "model.body.0.weight",
        "model.body.0.bias",
        "model.body.1.weight",
        "model.body.1.bias",
        "model.body.1.running_mean",
        "model.body.1.running_var",
        "model.body.1.num_batches_tracked",
    ]
    assert [n for n in tensors if n.startswith("optimizer.")] == [
        f"optimizer.{n}.momentum_buffer"
        for n in ("embed.weight", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias")
    ]
    assert set(values["optimizer"]["options"]) == {n for n, _ in model.named_parameters()}
    assert "params" not in values["optimizer"]["options"]["frozen"]


@pytest.mark.parametrize("part", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_wrappers_of_torch_do_not_show_in_names(part: str) -> None:
    model = Net()
    wrapped = nn.Module()
    wrapped.add_module(part, model)
    plain, wrapped_too = (read_state(m, optim.SGD(m.parameters()))[0] for m in (model, wrapped))
    assert list(plain) == list(wrapped_too)


def test_two_names_of_one_storage_come_once_but_views_of_it_all_come() -> None:
    model = nn.Module()
    flat = torch.arange(6.0)
    model.register_buffer("a", flat[:3])
    model.register_buffer("b", flat[3:])
    model.register_buffer("again", flat[:3])
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("empty_too", torch.empty(0))
    model.p = nn.Parameter(torch.ones(1))
    tensors, _ = read_state(model, optim.SGD(model.parameters()))
    assert list(tensors) == ["model.p", "model.a", "model.b", "model.empty", "model.empty_too"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reading_takes_no_hidden_step(name: str) -> None:
    """Reading through torch's own get_optimizer_state_dict does: its counter is 1 afterwards."""
    model, optimizer = trained(OPTIMIZERS[name], steps=0)
    entries = len(optimizer.state)
    before = state_bits(model, optimizer)
    assert state_bits(model, optimizer) == before and len(optimizer.state) == entries
    if name not in ("adagrad",):  # which alone makes its state when it is built
        assert entries == 0 and not [n for n in before[0] if n.startswith("optimizer.")]


def test_a_state_without_steps_clears_one_with_steps() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"], steps=3)
    fresh_model, fresh = trained(OPTIMIZERS["adam"], steps=0)
    write_state(model, optimizer, *read_state(fresh_model, fresh))
    assert len(optimizer.state) == 0


def test_types_stay_as_saved_where_torch_would_cast() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"], dtype=torch.bfloat16)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double() + 1e-12
    other_model, other = trained(OPTIMIZERS["adam"], steps=0, dtype=torch.bfloat16)
    write_state(other_model, other, *read_state(model, optimizer))
    assert state_bits(other_model, other) == state_bits(model, optimizer)
    assert {s["exp_avg"].dtype for s in other.state.values()} == {torch.float64}
    assert {s["step"].device.type for s in other.state.values()} == {"cpu"}


def test_new_tensors_follow_the_parameters_device_but_the_counter_stays() -> None:
    model, optimizer = trained(OPTIMIZERS["adamw-single"])
    forms = {name: form_of(tensor) for name, tensor in read_state(model, optimizer)[0].items()}
    on_meta = Net().to("meta")
    made = targets(on_meta, optim.AdamW(on_meta.parameters()), forms)
    devices = {name.rpartition(".")[2]: t.device.type for name, t in made.items() if name.startswith("optimizer.")}
    assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}
    held = targets(on_meta, optim.AdamW(on_meta.parameters(), capturable=True), forms)
    assert {t.device.type for n, t in held.items() if n.endswith(".step")} == {"meta"}


def test_how_a_group_is_computed_is_the_runs_own() -> None:
    model, optimizer = trained(OPTIMIZERS["adamw-fused"])
    other_model, other = trained(OPTIMIZERS["adamw-foreach"], steps=0)
    write_state(other_model, other, *read_state(model, optimizer))
    assert other.param_groups[0]["fused"] is None and other.param_groups[0]["foreach"] is True


def test_options_are_restored_by_group_with_their_types() -> None:
    model, optimizer = trained(two_groups)
    optimizer.param_groups[1]["lr"] = 0.125
    other_model, other = trained(two_groups, steps=0)
    write_state(other_model, other, *read_state(model, optimizer))
    assert [g["lr"] for g in other.param_groups] == [1e-3, 0.125]
    assert [g["betas"] for g in other.param_groups] == [(0.8, 0.9), (0.8, 0.9)]


def test_options_in_a_tensor_are_filled_in_place() -> None:
    model, optimizer = trained(OPTIMIZERS["adamw-tensor-lr"])
    optimizer.param_groups[0]["lr"].fill_(0.3)
    other_model, other = trained(OPTIMIZERS["adamw-tensor-lr"], steps=0)
    held = other.param_groups[0]["lr"]
    write_state(other_model, other, *read_state(model, optimizer))
    assert other.param_groups[0]["lr"] is held and held.item() == 0.3


def test_other_groups_are_refused() -> None:
    model, optimizer = trained(two_groups)
    other_model, other = trained(lambda m: optim.AdamW(m.parameters()), steps=0)
    with pytest.raises(CheckpointError, match="were saved with different options"):
        write_state(other_model, other, *read_state(model, optimizer))


def test_another_optimizer_is_refused() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    other_model, other = trained(OPTIMIZERS["sgd"], steps=0)
    with pytest.raises(CheckpointError, match="saved by Adam, the job's optimizer is SGD"):
        write_state(other_model, other, *read_state(model, optimizer))


def test_another_model_is_refused_and_nothing_is_written() -> None:
    model, optimizer = trained(OPTIMIZERS["sgd"])
    other_model = Net(torch.float64)
    before = [bits(p) for p in other_model.parameters()]
    with pytest.raises(CheckpointError, match=r"model.frozen is float32\[3\] in the checkpoint, float64\[3\] here"):
        write_state(other_model, optim.SGD(other_model.parameters(), lr=1), *read_state(model, optimizer))
    assert [bits(p) for p in other_model.parameters()] == before


def test_optimizers_without_plain_state_are_refused_by_name() -> None:
    model, _ = trained(OPTIMIZERS["sgd"], steps=0)
    optimizer = optim.SGD(model.parameters())
    optimizer.state[model.embed.weight]["history"] = [object()]
    with pytest.raises(UserError, match=r"state of SGD for embed.weight.history\[0\]"):
        read_state(model, optimizer)


def test_foreign_parameters_odd_options_and_extra_state_are_refused() -> None:
    model = Net()
    with pytest.raises(UserError, match="parameter 0 of its group 0 is no parameter of the model"):
        read_state(model, optim.SGD([nn.Parameter(torch.ones(1))]))
    odd = optim.SGD([{"params": list(model.parameters()), "hook": print}])
    with pytest.raises(UserError, match="option 'hook' of SGD"):
        read_state(model, odd)
    model.body[2].get_extra_state = lambda: {"a": 1}  # type: ignore[method-assign]
    model.body[2].__class__ = type("Extra", (nn.GELU,), {"get_extra_state": lambda self: {"a": 1}})
    with pytest.raises(UserError, match=r"body.2._extra_state"):
        read_state(model, optim.SGD(model.parameters()))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: schedules.StepLR(o, 2),
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 3, 3, 5]),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "cycle": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.5, step_size_up=2, cycle_momentum=False),
    "sequence": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9)], o),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_survive_as_plain_values(name: str) -> None:
    def run(optimizer: torch.optim.Optimizer, schedule: Any, first: int, last: int) -> list[float]:
        rates = []
        for _ in range(first, last):
            optimizer.step()
            schedule.step(*([1.0] if name == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(1, 1)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULES[name](optimizer)

    model, optimizer, schedule = begin()
    run(optimizer, schedule, 0, 3)
    tensors, values = read_state(model, optimizer)
    text = json.dumps(encode({**values, "schedule": schedule.state_dict()}, "values"), allow_nan=False)
    other_model, other, other_schedule = begin()
    loaded = decode(json.loads(text))
    write_state(other_model, other, tensors, loaded)
    other_schedule.load_state_dict(loaded["schedule"])
    assert run(other, other_schedule, 3, 9) == run(optimizer, schedule, 3, 9)
    assert not any(math.isnan(rate) for rate in run(optimizer, schedule, 9, 10))
