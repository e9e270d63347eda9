"""Fine-tunes a causal language model with LoRA on synthetic e-mails, each of which belongs to sender and recipients.

    python examples/lora_mail.py                              # a small untrained model
    python examples/lora_mail.py --checkpoint path/to/model   # weights and tokenizer of your own, from a folder

Needs the extra `coowned[torch]`, transformers and peft. The base model is frozen: only the small matrices of LoRA are
trained, clipped and noised. The checkpoint must not have been trained on these people's mail.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import coowned as co
import coowned.torch
from coowned.synthetic.toy_emails import EmailWorld

IGNORED = -100  # a label that transformers leaves out of the loss


def loss(module, example):
    """The mean over the tokens of ONE e-mail. Padding is at the end, where causal attention does not look."""
    tokens = example["tokens"]
    labels = torch.where(torch.arange(len(tokens)) < example["length"], tokens, IGNORED)
    return module(input_ids=tokens[None], labels=labels[None], use_cache=False).loss


def encoder(length, tokenizer=None):
    """Turns the text of one row into tokens: those of a tokenizer, or its bytes."""

    def encode(row):
        found = list(row["text"].encode()) if tokenizer is None else tokenizer(row["text"])["input_ids"]
        found = found[:length]
        return {"tokens": found + [0] * (length - len(found)), "length": len(found)}

    return encode


def make_module(checkpoint=None, hidden=64, rank=4):
    """The frozen language model with trainable LoRA matrices in its linear layers."""
    torch.manual_seed(0)
    if checkpoint is None:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
        model = LlamaForCausalLM(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.float32)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).eval()  # without dropout: masks would depend on who else is drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="folder of a causal language model and its tokenizer")
    parser.add_argument("--emails", type=int, default=2000)
    parser.add_argument("--length", type=int, default=64, help="tokens of an e-mail that are read")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--epsilon", type=float, default=8.0)
    options = parser.parse_args()

    mail = EmailWorld(num_people=options.emails // 4, num_emails=options.emails).generate(seed=0)
    tokenizer = None if options.checkpoint is None else AutoTokenizer.from_pretrained(options.checkpoint)
    module = make_module(options.checkpoint)
    run = coowned.torch.fit(
        co.from_table(mail, users="users", example_id="message_id"),
        module,
        loss,
        encode=encoder(options.length, tokenizer),
        encode_columns=["text"],
        epsilon=options.epsilon,
        delta=1e-6,
        adjacency="zero-out",
        selector=co.Priced(contribution_bound=4),
        batch_size=options.batch_size,
        iterations=options.iterations,
        learning_rate=1e-3,
    )
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in module.parameters()):,} parameters are trained")
    print(run.statement().splitlines()[0])
    for split, table in run.evaluations().items():
        print(f"{split}: loss {table['loss'][0]:.3f}")
    coowned.torch.load_trained(run, module)  # a PeftModel: module.save_pretrained("adapter") writes the LoRA alone


if __name__ == "__main__":
    main()
