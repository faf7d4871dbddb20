"""A checkpoint's weights as other programs read them: transformers, safetensors, and a plain module."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from jobs import classifier_job
from kept_ranks import KeptRanks
from records import record_file
from safetensors.torch import load_file, load_model, save_file
from torch import nn, optim

import evenly
from evenly.checkpoint.adapter import find_adapter, write_adapter
from evenly.checkpoint.config import find_model_config, write_model_config
from evenly.checkpoint.export import Exported, export, split
from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.manifest import Manifest, TensorForm
from evenly.checkpoint.pieces import TYPES, find_pieces, read_tensor
from evenly.checkpoint.state import read_state
from evenly.checkpoint.store import CheckpointStore, Snapshot
from evenly.cli.export import ExportOptions, run_export
from evenly.errors import CheckpointError, UserError
from evenly.observe.run_folder import RunFolder

WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **WIDTHS)),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, num_key_value_heads=1, **WIDTHS)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    ),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **WIDTHS)),
}


def save(folder: Path, model: nn.Module, *steps: int, scores: dict[int, float] | None = None) -> None:
    """What a run of `model` leaves in its folder, with checkpoints of `steps`."""
    folder.mkdir(exist_ok=True)
    write_model_config(model, RunFolder(folder).model_config)
    store = CheckpointStore(folder)
    for step in steps:
        store.save(Snapshot(step, *read_state(model, optim.SGD(model.parameters()))), score=(scores or {}).get(step))
    store.close()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


def loaded(model_class: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The state of `model_class.from_pretrained`, which had every tensor it wanted and no other."""
    model, told = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.state_dict()


@pytest.mark.full_but("*-float32", "gpt2-bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = MODELS[name]().to(dtype)
    save(tmp_path / "run", model, 3)
    one = export(tmp_path / "run", tmp_path / "one")
    assert one.files == ("model.safetensors",) and one.model_class == type(model).__name__
    assert_same(loaded(type(model), tmp_path / "one"), model.state_dict())
    many = export(tmp_path / "run", tmp_path / "many", shard_bytes=3000)
    assert len(many.files) > 2 and (many.tensors, many.bytes) == (one.tensors, one.bytes)
    assert_same(loaded(type(model), tmp_path / "many"), model.state_dict())


def test_the_files_are_those_of_save_pretrained(tmp_path: Path) -> None:
    model = MODELS["gpt2"]()
    save(tmp_path / "run", model, 3)
    for name, export_bytes, theirs in (("one", 10**9, "50GB"), ("many", 20_000, "20KB")):
        export(tmp_path / "run", tmp_path / name, shard_bytes=export_bytes)
        model.save_pretrained(tmp_path / f"their-{name}", max_shard_size=theirs)
        ours, expected = ({p.name: p for p in (tmp_path / n).iterdir()} for n in (name, f"their-{name}"))
        assert ours.keys() == expected.keys() and "generation_config.json" in ours
        for file in ("config.json", "generation_config.json"):
            assert json.loads(ours[file].read_text()) == json.loads(expected[file].read_text())
        for file in ours:
            if file.endswith(".safetensors"):
                assert_same(load_file(ours[file]), load_file(expected[file]))
    index, their_index = (json.loads((tmp_path / n / "model.safetensors.index.json").read_text()) for n in
                          ("many", "their-many"))  # fmt: skip
    assert index["weight_map"] == their_index["weight_map"]
    assert index["metadata"]["total_size"] == their_index["metadata"]["total_size"]


class Wrapped(nn.Module):
    """A transformers model in a user's module."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.loss, self.net = nn.Identity(), net


def test_a_submodule_that_holds_everything_loses_its_prefix(tmp_path: Path) -> None:
    model = MODELS["gpt2"]()
    save(tmp_path / "run", torch.compile(Wrapped(model), backend="eager"), 3)  # which puts a part of its own into names
    export(tmp_path / "run", tmp_path / "out")
    assert_same(loaded(type(model), tmp_path / "out"), model.state_dict())


def test_a_module_with_weights_of_its_own_keeps_its_names(tmp_path: Path) -> None:
    model = Wrapped(MODELS["gpt2"]())
    model.loss = nn.Linear(16, 2)
    save(tmp_path / "run", model, 3)
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.model_class is None and not (tmp_path / "out" / "config.json").exists()
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "net.lm_head.weight"}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


class Odd(nn.Module):
    """Tied weights, buffers of other types, and tensors without elements or dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3).bfloat16()
        for number, (name, _) in enumerate(TYPES.values()):
            if name not in ("float8_e4m3fnuz", "float8_e5m2fnuz"):
                self.register_buffer(f"of_{name}", torch.arange(number + 1).to(getattr(torch, name)))
        self.register_buffer("none", torch.empty(0, 3))


@pytest.mark.parametrize("shard_bytes", [10**9, 40])
def test_a_plain_module_loads_its_own_names(shard_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Odd(), Odd()
    save(tmp_path / "run", model, 3)
    done = export(tmp_path / "run", tmp_path / "out", shard_bytes=shard_bytes)
    assert done.model_class is None and not (tmp_path / "out" / "config.json").exists()
    nn.init.zeros_(other.embedding.weight)
    if len(done.files) == 1:
        load_model(other, tmp_path / "out" / done.files[0])
    for file in (tmp_path / "out").glob("*.safetensors"):
        other.load_state_dict(load_file(file), strict=False)
    assert_same(other.state_dict(), model.state_dict())


def test_pieces_that_cut_rows_and_columns_make_up_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = torch.randn(4, 5, 6).bfloat16()
    corners = [(rows, columns) for rows in (slice(0, 1), slice(1, 4)) for columns in (slice(0, 2), slice(2, 5))]
    for number, (rows, columns) in enumerate(corners):
        place = {"w": {"saved_offsets": [rows.start, columns.start, 0]}}
        piece = {"w": whole[rows, columns].contiguous()}
        save_file(piece, tmp_path / f"{number}.safetensors", {"DCP_SHARDING_INFO": json.dumps(place)})
    form = TensorForm("bfloat16", (4, 5, 6))
    files = [f"{number}.safetensors" for number in range(4)]
    pieces = find_pieces(tmp_path, files, {"w": form})
    assert read_tensor(form, pieces["w"]).tobytes() == bits(whole)


class Scored(Wrapped):
    """With a head of the user's behind the transformers model."""

    def __init__(self) -> None:
        super().__init__(MODELS["gpt2"]())
        self.score = nn.Linear(64, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.score(self.net(tokens).logits)


def scored_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    return evenly.Loss(model(batch).square().sum(), batch.numel())


def saved_in_stages(out: Path) -> None:
    job = evenly.Job(
        model=Scored, loss=scored_loss, data=torch.arange(48).view(8, 6), global_batch=4, steps=1, microbatch=2,
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    with evenly.start(job, plan="pp", out=out) as run:
        for batch in run.batches():
            run.step(batch)
        run.save()


def test_weights_that_only_a_later_stage_holds_keep_the_model_from_being_a_submodule(
    tmp_path: Path, ranks: KeptRanks
) -> None:
    ranks.run(saved_in_stages, tmp_path / "run")
    assert export(tmp_path / "run", tmp_path / "out").model_class is None
    names = {name for name, _ in Scored().named_parameters()}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names


# In a process of its own: what the largest tensor needs, whatever the model's size, and no torch.
MEASURED = """
import re, sys, tracemalloc
from pathlib import Path
from evenly.checkpoint.export import export

def resident_peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = resident_peak()
tracemalloc.start()
done = export(Path(sys.argv[1]), Path(sys.argv[2]))
assert "torch" not in sys.modules
print(done.bytes, tracemalloc.get_traced_memory()[1], resident_peak() - before)
"""


def test_memory_holds_one_tensor_and_never_the_model(tmp_path: Path) -> None:
    largest = 1 << 20
    save(tmp_path / "run", nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(48))), 1)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "run"), str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr
    model_bytes, traced, resident = map(int, done.stdout.split())
    assert model_bytes == 48 * largest
    assert traced < 2 * largest and resident < model_bytes / 4


def test_the_newest_the_best_or_the_one_that_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, nn.Linear(2, 1), 1, 2, 3, scores={1: 3.0, 2: 1.0})
    assert export(run, tmp_path / "newest").step == 3
    assert export(run, tmp_path / "best", step="best").step == 2
    assert export(run, tmp_path / "named", step=1).step == 1
    with pytest.raises(UserError, match="there are those of 1, 2, 3"):
        export(run, tmp_path / "other", step=4)


def test_no_checkpoint_and_none_that_was_evaluated_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it has no checkpoints"):
        export(tmp_path, tmp_path / "out")
    save(tmp_path, nn.Linear(2, 1), 7)
    with pytest.raises(UserError, match=r"none was evaluated[^$]*choose a step: 7"):
        export(tmp_path, tmp_path / "out", step="best")
    assert not (tmp_path / "out").exists()


def test_a_target_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "run", nn.Linear(2, 1), 1)
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="it is not empty"):
        export(tmp_path / "run", target)
    with pytest.raises(UserError, match="it is a file"):
        export(tmp_path / "run", target / "mine.txt")
    assert [path.name for path in target.iterdir()] == ["mine.txt"]


def test_an_altered_checkpoint_is_refused_and_a_sound_one_named(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 1), 1, 2)
    file = next(CheckpointFolder(tmp_path).path(2).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"was altered[^$]*export step 1"):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def forged(folder: Path, content: bytes, shape: tuple[int, ...] = (2, 2)) -> None:
    """A checkpoint whose one file has that content, and whose manifest says so."""
    inside = CheckpointFolder(folder)
    inside.begin(1)
    file = inside.partial(1) / "shard-00001-model-00001-of-00001.safetensors"
    file.write_bytes(content)
    forms = {"model.w": TensorForm("float32", shape)}
    inside.commit(Manifest(1, None, {file.name: record_file(file)}, forms, {}))


def file_of(header: Any, data_bytes: int = 16) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


ROW = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HALF = {**ROW, "shape": [1, 2], "data_offsets": [0, 8]}
AWAY = {"DCP_SHARDING_INFO": json.dumps({"model.w": {"saved_offsets": [1, 0]}})}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff" * 64, "header is longer"),
        (b"\x02", "malformed"),
        (file_of([]), "malformed"),
        (file_of({"model.w": ROW}, data_bytes=12), "malformed"),
        (file_of({"model.w": {**ROW, "data_offsets": [0, 12]}}), "malformed"),
        (file_of({"model.w": {**ROW, "shape": [-2, -2]}}), "malformed"),
        (file_of({"model.w": {**ROW, "dtype": "F4"}}), "malformed"),
        (file_of({"model.w": {**ROW, "dtype": "I32"}}), "files and its manifest differ"),
        (file_of({"model.v": ROW}), "files and its manifest differ"),
        (file_of({"model.w": {**ROW, "shape": [4]}}), "files and its manifest differ"),
        (file_of({"__metadata__": AWAY, "model.w": ROW}), "files and its manifest differ"),
        (file_of({"__metadata__": AWAY, "model.w": HALF}), "parts are missing"),
    ],
)
def test_a_foreign_file_is_refused_even_with_a_right_hash(content: bytes, reason: str, tmp_path: Path) -> None:
    forged(tmp_path, content)
    with pytest.raises(CheckpointError, match=reason):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "found: "),
        ("[]", "found: "),
        ('{"model_class": "A", "prefix": 1, "config": {}}', "another type"),
        ('{"model_class": "A", "prefix": "net.", "config": {}}', "weight is not in it"),
    ],
)
def test_a_configuration_of_another_form_or_model_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 1), 1)
    (RunFolder(tmp_path).model_config).write_text(text)
    with pytest.raises(UserError, match=rf"{reason}[^$]*remove it"):
        export(tmp_path, tmp_path / "out")


def test_what_was_written_goes_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 1)
    calls: list[Any] = []

    def read(*given: Any) -> Any:
        calls.append(given)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return read_tensor(*given)

    monkeypatch.setattr("evenly.checkpoint.export.read_tensor", read)
    with pytest.raises(CheckpointError, match="No space left"):
        export(tmp_path / "run", tmp_path / "new" / "out", shard_bytes=200)
    assert len(calls) == 3 and not (tmp_path / "new").exists()


def test_a_shape_that_no_array_can_have_is_refused(tmp_path: Path) -> None:
    shape = [0, 1 << 62]
    forged(tmp_path / "run", file_of({"model.w": {**ROW, "shape": shape, "data_offsets": [0, 0]}}), tuple(shape))
    with pytest.raises(CheckpointError, match="export to"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_are_filled_in_order() -> None:
    forms = {name: TensorForm("float32", (size,)) for name, size in (("a", 10), ("b", 10), ("c", 100), ("d", 1))}
    assert [*split(forms, 80).values()] == [["a", "b"], ["c"], ["d"]]
    assert [*split(forms, 80)] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert split(forms, 1000) == {"model.safetensors": [*forms]}


def test_only_a_model_of_transformers_has_a_configuration(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.config = {"width": 2}

    assert find_model_config(Own()) is None
    write_model_config(MODELS["vit"](), RunFolder(tmp_path).model_config)
    assert json.loads((RunFolder(tmp_path).model_config).read_text())["model_class"] == "ViTForImageClassification"
    write_model_config(Own(), RunFolder(tmp_path).model_config)  # another job in the same folder
    assert not (RunFolder(tmp_path).model_config).exists()


def run_with_average(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a run, with BatchNorm and a frozen parameter, and their averages with the buffers of the model."""
    with evenly.start(
        classifier_job(average=evenly.EMA(decay=0.5, start=2)), plan="single", out=folder, steps=4
    ) as run:
        for batch in run.batches():
            run.step(batch)
            if run.steps_done in (1, 4):
                run.save()
        weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        with run.averaged_weights():
            return weights, {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def test_averages_are_exported_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, averages = run_with_average(tmp_path / "run")
    assert not torch.equal(weights["last.weight"], averages["last.weight"])
    assert torch.equal(weights["frozen"], averages["frozen"])
    asked = ExportOptions(step="newest", average=True, shard_size="5GB", tokenizer=None, adapter=False)
    assert run_export(tmp_path / "run", tmp_path / "averages", asked, json_only=False) == 0
    assert "the averaged weights\n" in capsys.readouterr().out
    assert run_export(tmp_path / "run", tmp_path / "weights", replace(asked, average=False), json_only=False) == 0
    assert "the weights themselves; --average writes their average" in capsys.readouterr().out
    for name, expected in (("averages", averages), ("weights", weights)):
        assert_same(load_file(tmp_path / name / "model.safetensors"), expected)


def test_averages_that_are_not_there_are_not_exported(tmp_path: Path) -> None:
    run_with_average(tmp_path / "run")
    with pytest.raises(UserError, match=r"step 1 has none: the job keeps no average, or it begins later"):
        export(tmp_path / "run", tmp_path / "out", step=1, average=True)
    assert not (tmp_path / "out").exists()
    assert export(tmp_path / "run", tmp_path / "out", step=1).averaged is None


def test_what_was_exported_is_told(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 1), 5)
    told = export(tmp_path, tmp_path / "out")
    assert told == Exported(step=5, files=("model.safetensors",), tensors=2, bytes=12, model_class=None)


def test_the_tokenizer_s_files_are_copied(tmp_path: Path) -> None:
    save(tmp_path / "run", MODELS["llama"](), 1)
    given = tmp_path / "tokenizer"
    given.mkdir()
    with pytest.raises(UserError, match=r"it has none of tokenizer\.json"):
        export(tmp_path / "run", tmp_path / "out", tokenizer=given)
    assert not (tmp_path / "out").exists()
    (given / "tokenizer.json").write_text("{}")
    (given / "pytorch_model.bin").write_text("not copied")
    export(tmp_path / "run", tmp_path / "out", tokenizer=given)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip


# Of transformers, about what peft asks it.
quiet = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def adapted(seed: int) -> Any:
    """A Llama with an adapter in every linear layer of its blocks, its norm trained too."""
    torch.manual_seed(0)
    base = MODELS["llama"]()
    torch.manual_seed(seed)
    modules = peft.LoraConfig(r=3, target_modules="all-linear", modules_to_save=["norm"], init_lora_weights=False)
    return peft.get_peft_model(base, modules)


@quiet
@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped], ids=["bare", "wrapped"])
def test_peft_loads_the_adapter(wrap: Callable[[Any], nn.Module], tmp_path: Path) -> None:
    model = adapted(1)
    held = wrap(model)
    save(tmp_path / "run", held, 3)
    write_adapter(find_adapter(held), RunFolder(tmp_path / "run").adapter)
    done = export(tmp_path / "run", tmp_path / "out", adapter=True)
    model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert done.adapter and done.tensors == len(expected)
    assert_same(load_file(tmp_path / "out" / "adapter_model.safetensors"), expected)
    ours, theirs = (json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("out", "theirs"))
    assert ours.keys() == theirs.keys() and ours["r"] == 3 and ours["inference_mode"]
    torch.manual_seed(0)
    loaded_again = peft.PeftModel.from_pretrained(MODELS["llama"](), str(tmp_path / "out"))
    tokens = torch.arange(10).view(1, 10)
    assert torch.equal(loaded_again.eval()(tokens).logits, model.eval()(tokens).logits)


@quiet
def test_what_is_no_adapter_s_is_named(tmp_path: Path) -> None:
    model = adapted(1)
    model.base_model.model.lm_head.weight.requires_grad_(True)
    save(tmp_path / "run", model, 3)
    write_adapter(find_adapter(model), RunFolder(tmp_path / "run").adapter)
    with pytest.raises(UserError, match=r"the run trains \S*lm_head\S*, which no adapter has"):
        export(tmp_path / "run", tmp_path / "out", adapter=True)
    write_adapter(find_adapter(nn.Linear(2, 1)), RunFolder(tmp_path / "run").adapter)
    with pytest.raises(UserError, match="was no PeftModel"):
        export(tmp_path / "run", tmp_path / "out", adapter=True)


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 64, (7,), generator=torch.Generator().manual_seed(index))


def token_loss(model: nn.Module, tokens: torch.Tensor) -> evenly.Loss:
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    return evenly.Loss(nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), tokens.numel())


def train_adapter(plan: str, out: Path) -> None:
    job = evenly.Job(
        model=lambda: adapted(1), loss=token_loss, data=Tokens(), global_batch=4, steps=2, precision="float64",
        optimizer=lambda parameters: optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with evenly.start(job, plan=plan, out=out) as run:
            for batch in run.batches():
                run.step(batch)


@pytest.mark.full_but("zero3")
@quiet
@pytest.mark.parametrize("plan", ["zero3", "tensor=2", "pipeline=2"])
def test_an_adapter_that_was_trained_under_any_plan_is_exported(plan: str, ranks: KeptRanks, tmp_path: Path) -> None:
    train_adapter("single", tmp_path / "single")
    ranks.run(train_adapter, plan, tmp_path / "split")
    export(tmp_path / "single", tmp_path / "expected", adapter=True)
    done = export(tmp_path / "split", tmp_path / "found", adapter=True)
    expected, found = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("expected", "found"))
    assert found.keys() == expected.keys() and done.tensors == len(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)
    peft.PeftModel.from_pretrained(MODELS["llama"](), str(tmp_path / "found"))
