"""Known models have the parameters that are published of them; what cannot be read is refused in words."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evenly.errors import UserError
from evenly.planner.known import _entries, _key, active_parameters, find_shape, known_names, parameters

# As the Hugging Face Hub counts them in the published weights (vit-*: as torchvision does; t5-*, bert-*, roberta-*: of
# the class with the head that they were pretrained with).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "llama-7b": 6_738_415_616,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "vit-b-16": 86_567_656,
    "vit-b-32": 88_224_232,
    "vit-l-16": 304_326_632,
    "vit-l-32": 306_535_400,
    "vit-h-14": 632_045_800,
    "mpt-7b": 6_649_286_656,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "deepseek-7b": 6_910_365_696,
    "deepseek-67b": 67_425_001_472,
    "deepseek-moe-16b": 16_375_728_128,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
}

# Thousands of millions as their papers print them, where no weights were published.
PRINTED = {
    "gpt3-175b": "174.6",
    "megatron-1.7b": "1.7",
    "megatron-3.6b": "3.6",
    "megatron-7.5b": "7.5",
    "megatron-18.4b": "18.4",
    "megatron-39.1b": "39.1",
    "megatron-76.1b": "76.1",
    "megatron-145.6b": "145.6",
    "megatron-310.1b": "310.1",
    "megatron-529.6b": "529.6",
    "megatron-1008b": "1008.0",
    "bloomberggpt-50b": "50.6",
    "nemotron-4-15b": "15.6",
    "nemotron-4-340b": "341.0",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name: str) -> None:
    assert parameters(find_shape(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRINTED)
def test_printed_parameters(name: str) -> None:
    assert f"{parameters(find_shape(name)) / 1e9:.1f}" == PRINTED[name]


def test_active_parameters() -> None:
    """arXiv 2401.04088 prints 13B, 2505.09388 3B and 22B, 2401.06066 2.8B; dense models use all."""
    names = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-moe-16b")
    assert [round(active_parameters(find_shape(name)) / 1e9, 1) for name in names] == [12.9, 3.4, 22.2, 2.8]
    assert active_parameters(find_shape("gpt2")) == parameters(find_shape("gpt2"))


def test_known_shapes_can_exist() -> None:
    problems = {shape.name: [*shape.problems()] for shape, _ in _entries()}
    assert {name: found for name, found in problems.items() if found} == {}
    assert [shape.name for shape, _ in _entries() if shape.hidden % shape.heads] == []


def test_every_name_means_one_model() -> None:
    keys = [_key(name) for shape, also in _entries() for name in (shape.name, *also)]
    assert sorted(keys) == sorted(set(keys))
    assert [find_shape(name).name for name in known_names()] == known_names()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Meta-Llama-3-8B", "llama-3-8b"),
        ("llama3_1 70B", "llama-3.1-70b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("openai-community/gpt2", "gpt2"),
        ("GPT-2", "gpt2"),
        ("gpt-3-1.3b", "gpt3-1.3b"),  # not 13b
        ("gpt3-1-3b", "gpt3-1.3b"),
        ("gpt3-13b", "gpt3-13b"),
        ("google-bert/bert-base-uncased", "bert-base-uncased"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("EleutherAI/pythia-6.9b-deduped", "pythia-6.9b"),
    ],
)
def test_spellings(text: str, name: str) -> None:
    assert find_shape(text).name == name


def test_an_unknown_name_is_told_its_nearest() -> None:
    with pytest.raises(UserError) as told:
        find_shape("lama-3.1-8b")
    assert "near are llama-3.1-8b" in str(told.value)


# --- descriptions --------------------------------------------------------------------------------------


def test_a_described_shape_has_defaults() -> None:
    shape = find_shape("transformer:layers=3,hidden=64,heads=4")
    assert (shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab, shape.outputs) == (4, 16, 256, 50304, 50304)
    assert (shape.sequence, shape.causal, shape.bias, shape.qkv_bias) == (2048, True, True, True)
    assert parameters(shape) == 2 * 50304 * 64 + 2048 * 64 + 3 * (12 * 64 * 64 + 13 * 64) + 2 * 64


def test_a_described_shape_takes_every_field() -> None:
    shape = find_shape(
        "Transformer: layers=2, hidden=64, heads=4, kv_heads=2, bias=no, activation=swiglu, norm=rmsnorm, window=128,"
        "positions=rotary, experts=4, experts_per_token=2, tied=yes, name=mine, vocab=100"
    )
    assert (shape.name, shape.qkv_bias, shape.window, shape.expert_ffn, shape.tied) == ("mine", False, 128, 256, True)
    block = 2 * 64 * 64 + 2 * 64 * 32 + 64 * 4 + 4 * 3 * 64 * 256 + 2 * 64
    assert parameters(shape) == 100 * 64 + 2 * block + 64


def test_images_are_described_by_their_patches() -> None:
    shape = find_shape("transformer:layers=2,hidden=64,heads=4,patch=768,sequence=197")
    assert (shape.vocab, shape.outputs, shape.causal) == (0, 1000, False)


def test_a_known_shape_can_be_changed() -> None:
    shape = find_shape("gpt2")
    assert find_shape("gpt2:sequence=512,window=none") == replace(shape, sequence=512)
    assert find_shape("gpt2: vocab=50304").outputs == 50304


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("transformer", ["layers is missing", "hidden is missing", "heads is missing"]),
        ("transformer:layers=2,hidden=30,heads=4", ["hidden=30 cannot be shared evenly by heads=4"]),
        ("transformer:layers=2,hidden=32,heads=4,kv_heads=3", ["heads=4 cannot be shared evenly by kv_heads=3"]),
        (
            "transformer:layers=x,hiden=3,heads=0,bias=maybe,ffn,norm=batch,ffn=1,ffn=2",
            [
                "'layers=x' must be a whole number from 1",
                "'hiden=3' is no field (near: hidden)",
                "'heads=0' must be",
                "'bias=maybe' must be one of true",
                "'ffn' is not key=value",
                "'norm=batch' must be one of layernorm",
                "'ffn=2' is given twice",
                "hidden is missing",
            ],
        ),
        ("transformer:layers=99999999999,hidden=32,heads=4", ["from 1 to 10000"]),
        ("transformer:layers=2,hidden=32,heads=4,experts=2,experts_per_token=3", ["is more than experts=2"]),
        ("transformer:layers=2,hidden=32,heads=4,vocab=0", ["nothing goes in"]),
        ("gpt2:layers=0", ["'layers=0' must be"]),
        ("gpt2:kv_heads=5", ["heads=12 cannot be shared evenly by kv_heads=5"]),
        ("", ["no such model"]),
        ("x" * 9999, ["no such model"]),
        ("\0", ["no such model"]),
    ],
)
def test_malformed_texts_are_refused_with_all_problems(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as told:
        find_shape(text)
    assert [word for word in words if word not in str(told.value)] == []


# --- config.json ---------------------------------------------------------------------------------------

GPT2 = dict(model_type="gpt2", n_embd=768, n_layer=12, n_head=12, n_positions=1024, vocab_size=50257)


def test_a_config_is_found_by_its_path_or_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2), encoding="utf-8")
    assert find_shape(str(path)) == find_shape(f"{tmp_path}/") == replace(find_shape("gpt2"), name="gpt2")
    assert find_shape(f"{tmp_path}:sequence=256").sequence == 256


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[1]", "no table of keys"),
        (b'"' + b"x" * (1 << 20) + b'"', "larger than 1048576 bytes"),
        (b'{"model_type": "gpt5"}', "model_type is 'gpt5' (near: gpt2)"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as told:
        find_shape(str(path))
    assert words in str(told.value) and str(path) in str(told.value)


def test_a_missing_config_is_told(tmp_path: Path) -> None:
    for text in (str(tmp_path), str(tmp_path / "config.json")):
        with pytest.raises(UserError, match=r"no config\.json is there"):
            find_shape(text)


def test_an_unreadable_config_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}", encoding="utf-8")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        find_shape(str(path))


# --- lightness -----------------------------------------------------------------------------------------


def test_known_models_need_no_torch() -> None:
    program = "import sys, evenly.planner.known as known; known.find_shape('gpt2'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
