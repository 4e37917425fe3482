"""Combined checkpoints load as one model in fairseq's tools, equal to the mean of the members."""

import re

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_alma.ensemble import EnsembleLanguageModel
from tests.fairseq_alma.shared import changed


@pytest.fixture
def members(untrained):
    """Checkpoints of two models with different experts and widths, the models, their task."""
    other = ("--moe-expert-count", "6", "--decoder-embed-dim", "16", "--seed", "2")
    (first, a, task), (second, b, _) = untrained("member_0.pt"), untrained("member_1.pt", *other)
    return [first, second], [a, b], task


def combine(start, paths, out, *flags):
    finished = start("combine", *paths, "--out", out, *flags).wait()
    assert finished.code == 0, finished.output
    return out


@pytest.mark.parametrize("average", ["probs", "logits"])
@torch.no_grad()
def test_the_combined_model_is_the_mean_of_its_members(start, members, sample, tmp_path, average):
    paths, models, task = members
    out = combine(start, paths, tmp_path / "ens.pt", "--combine", average)
    (ensemble,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(out)], task=task)
    assert isinstance(ensemble, EnsembleLanguageModel)
    ensemble.eval()
    found = ensemble.get_normalized_probs(ensemble(**sample["net_input"]), log_probs=False)
    logits = [model(**sample["net_input"])[0] for model in models]
    probs = sum(each.softmax(-1) for each in logits) / 2
    expected = probs if average == "probs" else (sum(logits) / 2).softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert ensemble.max_positions() == 64


def perplexity(start, stream, path) -> float:
    finished = start("eval-lm", stream, "--task", "alma_lm", "--path", path, "--gen-subset", "valid").wait()
    assert finished.code == 0, finished.output
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", finished.output)[1])


def test_eval_lm_loads_it_as_one_model_and_agrees_with_a_list_of_members(start, members, stream, tmp_path):
    paths, _, _ = members
    combined = perplexity(start, stream, combine(start, paths, tmp_path / "ens.pt"))
    listed = perplexity(start, stream, f"{paths[0]}:{paths[1]}")
    alone = [perplexity(start, stream, path) for path in paths]
    assert combined == pytest.approx(listed, abs=2e-4)
    assert combined < max(alone)
    one = combine(start, paths[:1], tmp_path / "one.pt")
    assert perplexity(start, stream, one) == pytest.approx(alone[0], abs=2e-4)


@pytest.mark.parametrize(("command", "least"), [("interactive", 1), ("generate", 10)])
def test_texts_are_the_same_from_combined_and_listed_members(
    start, members, stream, tmp_path, command, least
):
    """Token by token, with incremental states of every member."""
    paths, _, _ = members
    (tmp_path / "input.txt").write_text("\u2581the \u2581of\n")
    flags = f"--task alma_lm --beam 2 --max-len-b 6 --input {tmp_path}/input.txt".split()
    if command == "generate":
        flags = "--task alma_lm --gen-subset valid --sample-break-mode eos --prefix-size 3".split()
        flags += "--batch-size 16 --beam 1 --max-len-b 5 --skip-invalid-size-inputs-valid-test".split()
    texts = []
    for path in (combine(start, paths, tmp_path / "ens.pt"), f"{paths[0]}:{paths[1]}"):
        finished = start(command, stream, "--path", path, *flags).wait()
        assert finished.code == 0, finished.output
        texts.append(sorted(re.findall(r"^H-(\d+)\t\S+\t(.*)$", finished.output, re.MULTILINE)))
    assert texts[0] == texts[1]
    assert len(texts[0]) >= least


def cut_dictionary(state):
    name = "decoder.embed_tokens.weight"
    state["model"][name] = state["model"][name][:-8]


def test_mismatched_members_are_one_clear_line_and_nothing_is_written(start, members, stream, tmp_path):
    (first, second), _, _ = members
    out = tmp_path / "out"

    def made(name, change):
        return changed(second, tmp_path / name, change)

    (tmp_path / "half.pt").write_bytes(first.read_bytes()[:2000])
    for number, (bad, message) in enumerate(
        (
            (made("v.pt", cut_dictionary), f"v.pt has a dictionary of 996 entries, {first} of 1004"),
            (
                made("b.pt", lambda state: state["cfg"]["task"].update(tokens_per_sample=32)),
                "b.pt was trained on blocks of 32 tokens",
            ),
            (tmp_path / "absent.pt", "absent.pt: no such checkpoint"),
            (tmp_path / "half.pt", "half.pt: truncated"),
            (
                made("o.pt", lambda state: state["model"].update(encoder=torch.zeros(1))),
                "o.pt is not a checkpoint of a decoder-only",
            ),
            (combine(start, [first, second], tmp_path / "ens.pt"), "ens.pt is an ensemble already"),
        )
    ):
        assert message in start("combine", first, bad, "--out", out).wait().error
        if number < 3:
            flags = [stream, "--task", "alma_lm", "--path", f"{first}:{bad}", "--gen-subset", "valid"]
            assert message in start("eval-lm", *flags).wait().error
            assert message in start("evaluate", *flags, "--out", out).wait().error
        assert not out.exists()


def test_training_it_is_refused(start, stream, tmp_path):
    flags = ["--task", "alma_lm", "--arch", "alma_ensemble", "--optimizer", "adam", "--max-tokens", 512]
    child = start("train", stream, *flags, "--save-dir", tmp_path / "s")
    assert "is made by `alma combine`, not trained" in child.wait().error
