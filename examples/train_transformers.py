"""Trainer, then PEFT beside frames: a small Llama learns to copy, then, by LoRA on values and MLP, to copy backwards.

python examples/train_transformers.py         # needs: pip install stiefel-geo[transformers] peft; nothing is downloaded
"""

import argparse
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import stiefel_geo
from stiefel_geo import diagnostics
from stiefel_geo.attention.patching import cores

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS, HALF = 32, 8


class Copies(Dataset[dict[str, Tensor]]):
    """Random words and then the same again, perhaps backwards; the loss counts the second half."""

    def __init__(self, number: int, backwards: bool) -> None:
        first = torch.randint(3, WORDS, (number, HALF), generator=torch.Generator().manual_seed(0))
        self.ids = torch.cat([first, first.flip(1) if backwards else first], 1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        labels = self.ids[i].clone()
        labels[:HALF] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def train(model: nn.Module, data: Copies, epochs: int, lr: float) -> float:
    """The mean loss of the run's last tenth of steps."""
    optimizer = stiefel_geo.ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.01), lr=lr)
    with TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=max(epochs * len(data) // 32 // 10, 1),
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train()
    return float([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])


def adapted(model: LlamaForCausalLM) -> PeftModel:
    """LoRA on values and MLP. PEFT freezes everything else, so frames and cores are told to train again."""
    wrapped = get_peft_model(model, LoraConfig(target_modules=["v_proj", "up_proj", "down_proj"], r=8))
    for _, parameter in [*stiefel_geo.frames(wrapped), *cores(wrapped)]:
        parameter.requires_grad_(True)
    return wrapped


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--smoke", action="store_true", help="one epoch on 128 sequences")
    args = parser.parse_args(argv)
    epochs, size = (1, 128) if args.smoke else (args.epochs, 2048)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SIZES))

    print(stiefel_geo.patch(model))
    print(f"copying, all parameters: loss {train(model, Copies(size, False), epochs, args.lr):.4f}")
    wrapped = adapted(model)
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    loss = train(wrapped, Copies(size, True), epochs, args.lr)
    print(f"backwards, LoRA and frames, {trained} parameters: loss {loss:.4f}")
    print(f"largest defect {max(float(d.max()) for d in diagnostics.defect(wrapped).values()):.1e}")

    merged = wrapped.merge_and_unload()
    stiefel_geo.unpatch(merged)
    with TemporaryDirectory() as out:
        merged.save_pretrained(out)
        LlamaForCausalLM.from_pretrained(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
