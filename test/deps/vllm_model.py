"""Writes a tiny model with random weights for vLLM into a new directory.

    "$(test/deps/vllm.sh)" test/deps/vllm_model.py DIR

Its tokens are bytes. Its answers are noise, but the engine around them is real.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:"
)

directory = sys.argv[1]

tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<unk>", "<s>", "</s>"]
ids = {token: i for i, token in enumerate(tokens)}

tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
)
fast.chat_template = CHAT_TEMPLATE
fast.save_pretrained(directory)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokens),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    bos_token_id=ids["<s>"],
    eos_token_id=ids["</s>"],
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
