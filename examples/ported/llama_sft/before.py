"""A small Llama with LoRA adapters (peft), fine-tuned on JSON lines that are streamed, by trl's SFTTrainer."""

import json
import sysconfig
import tempfile
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

folder = Path(tempfile.mkdtemp())
with open(folder / "train.jsonl", "w") as file:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        for paragraph in path.read_text(errors="ignore").split("\n\n"):
            if len(paragraph) > 80:
                file.write(json.dumps({"text": paragraph[:400]}) + "\n")

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
special = trainers.BpeTrainer(vocab_size=512, special_tokens=["<pad>", "<s>", "</s>"])
bpe.train_from_iterator([json.loads(line)["text"] for line in open(folder / "train.jsonl")], special)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")

set_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
args = SFTConfig(
    output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=40, learning_rate=1e-2,
    warmup_steps=4, max_length=96, save_strategy="no", logging_steps=10, report_to="none", use_cpu=True, bf16=False,
    gradient_checkpointing=False,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config), args=args, processing_class=tokenizer,
    train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", streaming=True),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
)
trainer.train()
