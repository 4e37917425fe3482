"""Make a small Qwen of random weights with its tokenizer, to try `alma train --init` at once:

python examples/tiny_model.py CORPUS.jsonl FOLDER

The tokenizer is byte-level, as Qwen's, and trained on the texts of CORPUS. The model has
0.2 million parameters.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENS = 1000
POSITIONS = 256
END = "<|endoftext|>"


def texts(corpus: str) -> Iterator[str]:
    """The documents of a file of JSON lines."""
    with open(corpus, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def make_tokenizer(corpus: str) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE."""
    bytes_and_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = bytes_and_words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, initial_alphabet=bytes_and_words.alphabet(), special_tokens=[END]
    )
    tokenizer.train_from_iterator(texts(corpus), trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def main(corpus: str, folder: str) -> None:
    """Write the model and its tokenizer into `folder`."""
    if Path(folder, "config.json").exists():
        sys.exit(f"error: {folder} has a model already: give another folder")
    tokenizer = make_tokenizer(corpus)
    transformers.set_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # as the class of Qwen's tokenizers reads it: with its own way to split words
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
