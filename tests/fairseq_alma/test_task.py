"""The task: training data of a stage, cutting of fairseq-preprocess data, errors."""

import json
import shutil

import numpy as np
import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq_cli.preprocess import main as preprocess
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from alma.stream import Stream, dtype_code, write_index
from fairseq_alma.data.preprocessed import assign, count_words, documents, indexed

LOADED = ("--sample-break-mode", "none", "--tokens-per-sample", "64")


def tokens_of(task, split: str) -> list[int]:
    """The blocks of a split in order, joined."""
    dataset = task.dataset(split)
    return torch.cat([dataset[i]["target"] for i in range(len(dataset))]).tolist()


def file_tokens(stream, *prefixes: str) -> list[int]:
    sizes: list[int] = []
    for prefix in prefixes:
        data = MMapIndexedDataset(str(stream / prefix))
        sizes += torch.cat([data[i] for i in range(len(data))]).tolist()
    return sizes


def whole(data):
    """All training items of a fairseq-preprocess directory."""
    return indexed([f"{shard}/train" for shard in data.split(":")])


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--stage", "0"), [0]),
        (("--stage", "2"), [2]),
        (("--stage", "0", "--waiting-time", "2"), [0, 1]),
        (("--stage", "1", "--waiting-time", "2"), [2]),
        (("--stage", "1", "--replay"), [0, 1]),
        (("--stage", "1", "--waiting-time", "2", "--replay"), [0, 1, 2]),
        (("--stage", "0", "--waiting-time", "3"), [0, 1, 2]),  # i.i.d.
    ],
)
def test_a_stage_trains_on_its_megabatches_and_no_others(build, stream, flags, parts):
    task, _ = build(*flags, *LOADED)
    for split, prefixes in (
        ("train", [f"megabatch_0{part}/train" for part in parts]),
        ("valid", ["valid"]),
    ):
        task.load_dataset(split)
        assert tokens_of(task, split) == file_tokens(stream, *prefixes)


def test_every_document_of_a_preprocessed_directory_is_in_exactly_one_megabatch(
    build, preprocessed, text
):
    task, _ = build("--megabatch-words", "12000", data=preprocessed)
    corpus = whole(preprocessed)
    parts = task.megabatches
    words = count_words([f"{shard}/train" for shard in preprocessed.split(":")], task.dictionary)
    assert words.sum() == sum(len(file.read_text().split()) for file in text.glob("*.txt"))
    assert len(parts) == round(words.sum() / 12000) > 3
    items = np.concatenate(parts)
    assert sorted(items.tolist()) == list(range(len(corpus)))
    first, end = documents(corpus.sizes)
    megabatch = np.empty(len(corpus), dtype=int)
    for number, part in enumerate(parts):
        megabatch[part] = number
    for a, b in zip(first, end, strict=True):
        assert len(set(megabatch[a:b])) == 1
        assert corpus.sizes[b - 1] == 1 or b == len(corpus)
    longest = max(words[a:b].sum() for a, b in zip(first, end, strict=True))
    running = np.cumsum([words[part].sum() for part in parts])[:-1]
    assert np.all(np.abs(running - 12000 * np.arange(1, len(parts))) <= longest / 2 + 1)


@pytest.fixture(scope="module")
def numbered(text, gpt2_files, tmp_path_factory):
    """A text in GPT-2's ids as fairseq's recipe for RoBERTa makes it, and its number of words."""
    folder = tmp_path_factory.mktemp("numbered")
    encoder = get_encoder(*map(str, gpt2_files))
    lines = (text / "help.txt").read_text().splitlines()
    lines = [" ".join(line.split()) for line in lines]
    encoded = [" ".join(map(str, encoder.encode(line))) for line in lines]
    (folder / "train").write_text("\n".join(encoded) + "\n")
    (folder / "ids.txt").write_text("".join(f"{i} 1\n" for i in range(1000)) + "madeupword0000 0\n")
    flags = (
        f"--only-source --workers 1 --srcdict {folder}/ids.txt --destdir {folder}/bin --trainpref"
    )
    preprocess(options.get_preprocessing_parser().parse_args([*flags.split(), f"{folder}/train"]))
    return f"{folder}/bin", len(" ".join(lines).split())


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.text("ab .,'1é中\t\v \x1c", max_size=20), min_size=1, max_size=8))
@example(lines=["", " a  b", "\ta", "a\t\t b  ", "a b", "   ", "The  cat"])
def test_words_of_gpt2_ids_are_those_of_the_raw_text(gpt2_files, tmp_path, lines):
    """At the start and end of a line, blank lines, tabs and runs of white space;
    without a strip too."""
    encoder = get_encoder(*map(str, gpt2_files))
    items = [[i + 4 for i in encoder.encode(line)] + [2] for line in lines]
    prefix = str(tmp_path / "train")
    np.array([i for item in items for i in item], np.uint16).tofile(prefix + ".bin")
    write_index(prefix + ".idx", np.array([len(item) for item in items], np.int32), dtype_code(8))
    numbers = Dictionary()
    for i in range(1000):
        numbers.add_symbol(str(i))
    counts = count_words([prefix], numbers, str(gpt2_files[0])).tolist()
    assert counts == [len(line.split()) for line in lines]


def test_gpt2_ids_with_their_encoder_json_are_cut_as_in_the_paper(
    build, numbered, gpt2_files, tmp_path
):
    data, words = numbered
    small = build("--gpt2-encoder-json", gpt2_files[0], data=data)[0]
    assert len(small.megabatches) == 1
    assert (
        small.note == f"{words:,} words are one mega-batch: --megabatch-words N cuts smaller ones"
    )
    assert build(data=data)[0].is_cut() is False
    beside = tmp_path / "beside"
    shutil.copytree(data, beside)
    shutil.copy(gpt2_files[0], beside / "encoder.json")
    assert len(build("--megabatch-words", "5000", data=beside)[0].megabatches) > 1
    default = build(data=beside)[0]
    assert (default.megabatch_words, len(default.megabatches)) == (440_000_000, 1)
    assert len(np.unique(default.megabatches[0])) == len(whole(str(beside)))
    assert build("--megabatch-tokens", "9000", data=beside)[0].megabatch_words == 0
    with pytest.raises(UserError, match="1 mega-batches with --waiting-time 1 have stages 0 to 0"):
        build("--stage", "1", data=beside)


def test_a_corpus_of_gpt2_ids_above_the_papers_size_is_cut(
    build, numbered, gpt2_files, monkeypatch
):
    data, words = numbered
    monkeypatch.setattr("fairseq_alma.data.preprocessed.MEGABATCH_WORDS", words // 3)
    task, _ = build("--gpt2-encoder-json", gpt2_files[0], data=data)
    assert (len(task.megabatches), task.note) == (3, "")


def test_gpt2_ids_without_the_encoder_json_that_made_them(build, numbered, gpt2_files, tmp_path):
    data, _ = numbered
    for flags in ((), ("--bpe", "gpt2")):
        with pytest.raises(
            UserError, match="give its encoder.json by --gpt2-encoder-json FILE.*-tokens N"
        ):
            build("--megabatch-words", "5000", *flags, data=data)[0].megabatches  # noqa: B018
    few = {token: i for token, i in json.loads(gpt2_files[0].read_text()).items() if i < 500}
    (tmp_path / "few.json").write_text(json.dumps(few))
    (tmp_path / "no.json").write_text("[1]")
    problems = {"few": "of another vocabulary", "no": "not GPT-2's"}
    for name, message in problems.items():
        task, _ = build(
            "--megabatch-words", "9", "--gpt2-encoder-json", f"{tmp_path}/{name}.json", data=data
        )
        with pytest.raises(UserError, match=f"{name}.json: .*{message}"):
            task.megabatches  # noqa: B018


def test_the_cut_depends_on_its_seed_only(build, preprocessed):
    def cut(*flags):
        task, _ = build("--megabatch-words", "12000", *flags, data=preprocessed)
        return [part.tolist() for part in task.megabatches]

    assert cut() == cut("--seed", "99")
    assert cut() != cut("--megabatch-seed", "2")


def test_a_preprocessed_directory_without_a_size_is_one_megabatch(build, preprocessed):
    task, _ = build(*LOADED, data=preprocessed)
    task.load_dataset("train")
    assert len(tokens_of(task, "train")) == whole(preprocessed).sizes.sum()
    with pytest.raises(UserError, match="is one mega-batch: give --megabatch-words"):
        build("--stage", "1", data=preprocessed)[0].load_dataset("train")


def test_a_dictionary_without_marks_of_words_is_refused(tmp_path):
    numbers = Dictionary()
    numbers.add_symbol("262")
    with pytest.raises(UserError, match="--megabatch-tokens"):
        count_words([str(tmp_path / "train")], numbers)


@given(
    weights=st.lists(st.integers(0, 30), min_size=1, max_size=80),
    target=st.integers(1, 200),
    seed=st.integers(0, 5),
)
def test_cuts_are_at_the_document_nearest_to_each_target(weights, target, seed):
    sizes = np.full(len(weights), 2)  # a document each
    try:
        parts = assign(sizes, np.array(weights), target, seed)
    except UserError:
        assert max(weights) >= target or sum(weights) <= target / 2
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(weights)))
    running = np.cumsum([sum(weights[i] for i in part) for part in parts])
    for k, total in enumerate(running[:-1], start=1):
        assert abs(total - k * target) <= max(weights) / 2
    assert len(parts) == round(sum(weights) / target)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=50))
def test_documents_cover_the_items_in_order(sizes):
    first, end = documents(np.array(sizes))
    assert first[0] == 0
    assert end[-1] == len(sizes)
    assert (first[1:] == end[:-1]).all()
    if 1 in sizes:
        assert all(1 not in sizes[a : b - 1] for a, b in zip(first, end, strict=True))


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def alter(path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "megabatch_00/train.idx").unlink(), "train.idx.*missing"),
        (lambda d: truncate(d / "megabatch_00/train.bin"), "train.bin.*truncated"),
        (lambda d: alter(d / "megabatch_00/train.bin"), "train.bin.*changed"),
        (lambda d: alter(d / "dict.txt"), "dict.txt.*changed"),
        (lambda d: (d / "dict.txt").unlink(), "dict.txt is missing"),
        (
            lambda d: (d / "dict.txt").write_text("a b c\n" * 3),
            "dict.txt is not a dictionary: Incorrect",
        ),
        (lambda d: (d / "dict.txt").write_bytes(b"\xff\xfe 1\n"), "dict.txt is not a dictionary"),
    ],
)
def test_a_damaged_stream_is_refused(build, stream, tmp_path, damage, words):
    data = tmp_path / "damaged"
    shutil.copytree(stream, data)
    damage(data)
    with pytest.raises(UserError, match=words):
        build(data=data)[0].load_dataset("train")


def test_damaged_preprocessed_data_are_refused(build, preprocessed, tmp_path):
    shard = tmp_path / "shard"
    shutil.copytree(preprocessed.split(":")[0], shard)
    truncate(shard / "train.bin")
    with pytest.raises(UserError, match="train.bin has .* bytes, its index says"):
        build("--megabatch-words", "20000", data=shard)[0].load_dataset("train")
    truncate(shard / "train.idx")
    with pytest.raises(UserError, match="train.idx: not a fairseq mmap index"):
        build("--megabatch-words", "20000", data=shard)[0].load_dataset("train")


def test_an_empty_split_is_refused(build, preprocessed, tmp_path):
    shard = tmp_path / "shard"
    shutil.copytree(preprocessed.split(":")[0], shard)
    (shard / "train.bin").write_bytes(b"")
    write_index(shard / "train.idx", np.zeros(0, np.int32), dtype_code(8))
    with pytest.raises(UserError, match="train is empty"):
        build(data=shard)[0].load_dataset("train")


def test_a_stage_out_of_range_is_refused(build, stream):
    count = len(Stream.load(stream).megabatches)
    for flags in (
        ("--stage", str(count)),
        ("--stage", "-1"),
        ("--stage", "2", "--waiting-time", "2"),
    ):
        with pytest.raises(UserError, match="have stages 0 to"):
            build(*flags)[0].load_dataset("train")


def test_evaluation_cuts_blocks_to_the_models_positions(build):
    task, _ = build("--tokens-per-sample", "512")
    task.load_dataset("test")
    batches = list(task.eval_lm_dataloader(task.dataset("test"), max_positions=64, max_tokens=512))
    assert max(batch["net_input"]["src_tokens"].size(1) for batch in batches) == 64
    assert sum(batch["ntokens"] for batch in batches) == len(tokens_of(task, "test"))
