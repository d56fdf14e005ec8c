#!/usr/bin/env python3
"""Writes tiny random models of each architecture and their logits, as transformers computes them.

transformers_logits.py FOLDER   one folder a model: config.json, model.safetensors (bf16), tokenizer.json, tokens.txt,
                                logits.bin (f32, from the same bf16 weights in f32 arithmetic)

Prints the folders. Needs torch, transformers and tokenizers; no network, no GPU.
"""
import json
import pathlib
import sys

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 512
LENGTH = 150


def configs():
    common = dict(vocab_size=VOCAB, hidden_size=256, num_hidden_layers=3, num_attention_heads=4,
                  max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    gated = dict(common, intermediate_size=512, num_key_value_heads=2)
    llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=64, rope_theta=10000.0)
    yield "llama", transformers.LlamaConfig(**gated, tie_word_embeddings=False)
    yield "llama3-scaled", transformers.LlamaConfig(**gated, tie_word_embeddings=True, rope_scaling=llama3)
    yield "qwen2", transformers.Qwen2Config(**gated, tie_word_embeddings=False)
    yield "qwen3", transformers.Qwen3Config(**gated, head_dim=128, tie_word_embeddings=True)
    opt = dict(common, pad_token_id=1)
    yield "opt", transformers.OPTConfig(**opt, ffn_dim=1024, word_embed_proj_dim=256, dropout=0.0)


def randomise(model):
    """Norms and biases too: their defaults of one and zero would hide a missing one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                offset = 1.0 if name.endswith("weight") else 0.0
                parameter.copy_(offset + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
            parameter.copy_(parameter.bfloat16().float())


def write_tokenizer(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(["<s>", "</s>", *alphabet])}
    while len(vocab) < VOCAB:
        vocab[f"word{len(vocab)}"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def main(out):
    torch.manual_seed(7)
    for name, config in configs():
        folder = out / name
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomise(model)
        tokens = torch.randint(2, VOCAB, (1, LENGTH))
        with torch.no_grad():
            logits = model(tokens).logits[0].float()
        model.to(torch.bfloat16).save_pretrained(folder)
        write_tokenizer(folder)
        (folder / "tokens.txt").write_text(" ".join(map(str, tokens[0].tolist())))
        (folder / "logits.bin").write_bytes(logits.numpy().tobytes())
        print(folder)


main(pathlib.Path(sys.argv[1]))
