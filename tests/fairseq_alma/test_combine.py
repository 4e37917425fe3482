"""Combined checkpoints load as one model in fairseq's tools, equal to the mean of the members."""

import re

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_alma.ensemble import EnsembleLanguageModel


@pytest.fixture
def members(build, stream, tiny, tmp_path):
    """Checkpoints of two untrained models with different experts and widths, the models, their task."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.options import get_training_parser, parse_args_and_arch
    from omegaconf import OmegaConf

    paths, models = [], []
    for i, flags in enumerate(
        (["--seed", "1"], ["--moe-expert-count", "6", "--decoder-embed-dim", "16", "--seed", "2"])
    ):
        task, model = build(*flags)
        arguments = [str(stream), *tiny, *flags]
        cfg = convert_namespace_to_omegaconf(parse_args_and_arch(get_training_parser("alma_lm"), arguments))
        state = {
            "args": None,
            "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
            "model": model.state_dict(),
            "optimizer_history": [
                {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 1}
            ],
            "extra_state": {"train_iterator": {"epoch": 1}},
            "last_optimizer_state": {"state": {}},
        }
        paths.append(tmp_path / f"member_{i}.pt")
        torch.save(state, paths[-1])
        models.append(model.eval())
    return paths, models, task


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


def test_interactive_generates_the_same_from_combined_and_listed_members(start, members, stream, tmp_path):
    """Token by token, with incremental states of every member."""
    paths, _, _ = members
    text = tmp_path / "input.txt"
    text.write_text("\u2581the \u2581of\n")
    texts = []
    for path in (combine(start, paths, tmp_path / "ens.pt"), f"{paths[0]}:{paths[1]}"):
        flags = ["--task", "alma_lm", "--path", path, "--beam", 2, "--max-len-b", 6, "--input", text]
        finished = start("interactive", stream, *flags).wait()
        assert finished.code == 0, finished.output
        texts.append(re.findall(r"^H-0\t\S+\t(.*)$", finished.output, re.MULTILINE))
    assert texts[0] == texts[1]
    assert texts[0]


def test_generate_generates_the_same_from_combined_and_listed_members(start, members, stream, tmp_path):
    paths, _, _ = members
    texts = []
    for path in (combine(start, paths, tmp_path / "ens.pt"), f"{paths[0]}:{paths[1]}"):
        flags = ["--task", "alma_lm", "--path", path, "--gen-subset", "valid", "--sample-break-mode", "eos"]
        flags += ["--prefix-size", 3, "--batch-size", 16, "--beam", 1, "--max-len-b", 5]
        finished = start("generate", stream, *flags, "--skip-invalid-size-inputs-valid-test").wait()
        assert finished.code == 0, finished.output
        texts.append(sorted(re.findall(r"^H-(\d+)\t\S+\t(.*)$", finished.output, re.MULTILINE)))
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10


def changed(path, out, change):
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, out)
    return out


def cut_dictionary(state):
    name = "decoder.embed_tokens.weight"
    state["model"][name] = state["model"][name][:-8]


def test_mismatched_members_are_one_clear_line_and_nothing_is_written(start, members, tmp_path):
    (first, second), _, _ = members

    def error(*paths):
        out = tmp_path / "bad.pt"
        line = start("combine", *paths, "--out", out).wait().error
        assert not out.exists()
        return line

    smaller = changed(second, tmp_path / "v.pt", cut_dictionary)
    assert re.search(r"v\.pt has a dictionary of \d+ entries, .*member_0\.pt of \d+", error(first, smaller))
    shorter = changed(
        second, tmp_path / "b.pt", lambda state: state["cfg"]["task"].update(tokens_per_sample=32)
    )
    assert "b.pt was trained on blocks of 32 tokens" in error(first, shorter)
    assert "absent.pt: no such checkpoint" in error(first, tmp_path / "absent.pt")
    (tmp_path / "half.pt").write_bytes(first.read_bytes()[:2000])
    assert "half.pt: truncated" in error(first, tmp_path / "half.pt")
    other = changed(second, tmp_path / "o.pt", lambda state: state["model"].update(encoder=torch.zeros(1)))
    assert "o.pt is not a checkpoint of a decoder-only" in error(first, other)
    nested = combine(start, [first, second], tmp_path / "ens.pt")
    assert "ens.pt is an ensemble already" in error(first, nested)


def test_eval_lm_and_our_evaluation_refuse_mismatched_members_in_one_clear_line(
    start, members, stream, tmp_path
):
    (first, second), _, _ = members
    smaller = changed(second, tmp_path / "v.pt", cut_dictionary)
    shorter = changed(
        second, tmp_path / "b.pt", lambda state: state["cfg"]["task"].update(tokens_per_sample=32)
    )
    for bad, message in (
        (smaller, "v.pt has a dictionary of"),
        (shorter, "b.pt was trained on blocks of 32 tokens"),
        (tmp_path / "absent.pt", "absent.pt: no such checkpoint"),
    ):
        flags = [stream, "--task", "alma_lm", "--path", f"{first}:{bad}", "--gen-subset", "valid"]
        assert message in start("eval-lm", *flags).wait().error
        out = tmp_path / "result.json"
        assert message in start("evaluate", *flags, "--out", out).wait().error
        assert not out.exists()


def test_training_it_is_refused(start, stream, tmp_path):
    flags = ["--task", "alma_lm", "--arch", "alma_ensemble", "--optimizer", "adam", "--max-tokens", 512]
    child = start("train", stream, *flags, "--save-dir", tmp_path / "s")
    assert "is made by `alma combine`, not trained" in child.wait().error
