"""Continue a text: `alma generate`. The models of an ensemble are averaged, as in evaluation."""

from pathlib import Path

from alma.errors import Parser, UserError, command
from fairseq_alma.defaults import WEIGHTS_HELP, weights

_EXAMPLES = """\
examples:
  alma generate runs/gmoe "The first"
  alma generate runs/gmoe "The first" --temperature 0 --max-new-tokens 20
  alma generate stage_01/checkpoint_best.pt "The first" --seed 3
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m fairseq_alma.generate",
        usage="%(prog)s {RUN | CHECKPOINT} PROMPT [options]",
        description="Print a text with its continuation by a model, up to the end of the line.",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    add(
        "model",
        metavar="RUN|CHECKPOINT",
        help="a run of `alma train`: the models of its last stage; or a file",
    )
    add("prompt", metavar="PROMPT", help="text to continue; may be empty")
    add("--max-new-tokens", type=int, default=50, metavar="N", help="tokens to add, at most (default: 50)")
    temperature = "below 1: more probable tokens; 0: always the most probable one (default: 1)"
    add("--temperature", type=float, default=1.0, metavar="T", help=temperature)
    add("--seed", type=int, default=0, metavar="S", help="of the random choices (default: 0)")
    stream = "stream with the tokenizer (default: the one that the model was trained on)"
    add("--tokenizer", type=Path, metavar="STREAM", help=stream)
    add("--weights", type=weights, metavar="WEIGHTS", help=f"{WEIGHTS_HELP}; of RUN: those it evaluates")
    return made


def generate(what: str, prompt: str, length: int, temperature: float, seed: int, models) -> str:
    """`prompt` and its continuation by at most `length` tokens. UserError: no tokenizer, no such model."""
    import torch
    from fairseq.data import encoders

    from alma.stream import is_stream
    from fairseq_alma import stage_record

    if not is_stream(models.stream):
        raise UserError(f"{models.stream}: no stream here; give the stream of {what} as --tokenizer STREAM")
    words = [str(models.stream), "--path", ":".join(models.paths)]
    loaded = stage_record.load_trained(words, models.weights, 0)
    model, dictionary = stage_record.deployed(loaded).eval(), loaded.task.dictionary
    tokenizer = encoders.build_bpe(_bpe(models.stream))
    lines = [" ".join(line.split()) for line in prompt.split("\n")]
    tokens = [dictionary.bos() if loaded.cfg.task.add_bos_token else dictionary.eos()]
    for number, line in enumerate(lines):
        tokens += [dictionary.eos()] * (number > 0)
        tokens += [dictionary.index(piece) for piece in tokenizer.encode(line).split()]
    generator = torch.Generator().manual_seed(seed)
    window, start = int(model.max_positions()), len(tokens)  # type: ignore[operator]
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([tokens[-window:]]))[0][0, -1].float()
            logits[[dictionary.bos(), dictionary.pad(), dictionary.unk()]] = -torch.inf
            if temperature:
                chances = torch.softmax(logits / temperature, -1)
                token = int(torch.multinomial(chances, 1, generator=generator))
            else:
                token = int(logits.argmax())
            if token == dictionary.eos():
                break
            tokens.append(token)
    text = " ".join(dictionary[token] for token in tokens[start:])
    last = tokenizer.decode(f"{tokenizer.encode(lines[-1])} {text}".strip())
    return "\n".join([*lines[:-1], last])


def _bpe(stream: Path):
    """fairseq's settings of a stream's tokenizer."""
    from argparse import Namespace

    if (stream / "vocab.bpe").is_file():
        files = {"gpt2_encoder_json": stream / "encoder.json", "gpt2_vocab_bpe": stream / "vocab.bpe"}
        return Namespace(bpe="gpt2", **{name: str(file) for name, file in files.items()})
    return Namespace(bpe="sentencepiece", sentencepiece_model=str(stream / "tokenizer.model"))


@command
def main() -> None:
    """Continue a text."""
    options = parser().parse_args()
    for flag, value in (("--max-new-tokens", options.max_new_tokens), ("--temperature", options.temperature)):
        if not 0 <= value < float("inf"):
            raise UserError(f"{flag} {value}: give 0 or more")
    from fairseq_alma.run_models import models_of

    models = models_of(options.model, options.tokenizer, options.weights)
    sizes = (options.max_new_tokens, options.temperature, options.seed)
    print(generate(options.model, options.prompt, *sizes, models))


if __name__ == "__main__":
    main()
