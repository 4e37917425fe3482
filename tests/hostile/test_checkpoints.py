"""Checkpoints of plain data that try to run code:
as models, as --init, in a run, for another training."""

from collections import OrderedDict

import pytest

from alma.options import joined_words
from fairseq_alma import saved_config
from fairseq_alma.checkpoint import memory_map
from tests.hostile import sources


def model(**changes):
    return lambda state, place: state["cfg"]["model"].update(changes)


def text(section, name):
    def change(state, place):
        state["cfg"][section][name] = place.code

    return change


def fconv(state, place):
    state["cfg"]["model"].update(_name="fconv_lm", criterion="x", decoder_layers=place.code)


def characters(state, place):
    state["cfg"]["model"].update(character_embeddings=True, character_filters=place.code)


def wav2vec(state, place):
    state["cfg"]["model"].update(_name="wav2vec2", conv_feature_layers=place.code)


def lightconv(state, place):
    filters = {"character_embeddings": True, "character_filters": place.code}
    state["cfg"]["model"].update(_name="lightconv_lm", **filters)


def adaptive(state, place):
    state["cfg"]["model"].update(adaptive_input=True, adaptive_input_cutoff=place.code)


def attention(state, place):
    state["cfg"]["model"].update(decoder_xformers_att_config=place.code)


def old_settings(state, place):
    args = OrderedDict()
    settings = state["cfg"]["model"] | {
        "arch": "transformer_lm",
        "task": "alma_lm",
        "data": str(place.stream),
    }
    vars(args).update(settings | {"character_embeddings": True, "character_filters": place.code})
    state["args"] = args


def bomb(state, place):
    state["cfg"]["model"].update(_name="fconv_lm", decoder_layers="[0] * 9999 * 9999 * 9999")


def power(state, place):
    state["cfg"]["model"].update(_name="fconv_lm", decoder_layers="9**9**9**9")


def nested(state, place):
    state["cfg"]["model"].update(_name="fconv_lm", decoder_layers="[" * 4000)


def meter(state, place):
    state["extra_state"]["metrics"] = {
        "default": [[1, "x", "MetersDict", {}], [1, "x", "__import__", {}]]
    }


def other_object(state, place):
    state["cfg"]["model"]["decoder_layers"] = OrderedDict()


def no_sections(state, place):
    state["cfg"]["checkpoint"] = [place.code]


HOSTILE = {
    "sections": (no_sections, "cfg.checkpoint"),
    "fconv_lm": (fconv, "decoder_layers"),
    "characters": (characters, "character_filters"),
    "wav2vec2": (wav2vec, "'wav2vec2'"),
    "lightconv": (lightconv, "character_filters"),
    "adaptive": (adaptive, "adaptive_input_cutoff"),
    "attention": (attention, "decoder_xformers_att_config"),
    "optimizer": (text("optimizer", "adam_betas"), "adam_betas"),
    "lr": (text("optimization", "lr"), "cfg.optimization.lr"),
    "update_freq": (text("optimization", "update_freq"), "update_freq"),
    "args": (old_settings, "args"),
    "unknown": (model(_name="../planted"), "'../planted'"),
    "no model": (lambda state, place: state["cfg"].update(model=None), "names no model"),
    "interpolation": (model(activation_fn="${oc.env:HOME}"), "refers to other settings"),
    "flag": (model(activation_fn="--user-dir=planted"), "could pass for a flag"),
    "type": (model(decoder_layers="2; 3"), "decoder_layers"),
    "list for a number": (model(decoder_embed_dim=[16]), "decoder_embed_dim"),
    "bomb": (bomb, "decoder_layers"),
    "power": (power, "decoder_layers"),
    "nested": (nested, "decoder_layers"),
    "object": (other_object, "no plain data"),
    "meter": (meter, "no meter"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_evaluation_refuses(place, kind):
    change, named = HOSTILE[kind]
    path = place.tampered("checkpoint_best.pt", lambda state: change(state, place))
    error = place.refused("evaluate", place.stream, "--path", path, "--cpu", "--out", "result.json")
    assert named in error
    assert str(path) in error
    assert not (place.work / "result.json").exists()


READERS = {
    "fairseq-eval-lm": "{stream} --task alma_lm --path {path} --cpu",
    "fairseq-train": "{stream} --task alma_lm --arch switch_gmoe_tiny --cpu --max-tokens 512 "
    "--tokens-per-sample 32 --save-dir here --finetune-from-model {path}",
    "fairseq-train --restore-file": "{stream} --task alma_lm --arch switch_gmoe_tiny --cpu "
    "--max-tokens 512 --tokens-per-sample 32 --save-dir here --restore-file {path}",
    "fairseq-train --init": "{stream} --task alma_lm --cpu --init {path} --save-dir here",
    "fairseq-generate": "{stream} --task alma_lm --path {path} --cpu --max-tokens 512",
    "fairseq-interactive": "{stream} --task alma_lm --path {path} --cpu",
    "export": "{path} --out exported",
}


@pytest.mark.parametrize("reader", READERS)
def test_every_command_that_reads_a_checkpoint_refuses(place, reader):
    path = place.tampered("checkpoint_best.pt", lambda state: characters(state, place))
    words = READERS[reader].format(stream=place.stream, path=path)
    assert "character_filters" in place.refused(reader.split()[0], *words.split())
    assert not (place.work / "exported").exists()


@pytest.mark.parametrize("reader", ["fairseq-interactive", "fairseq-train"])
def test_old_settings_are_refused_before_they_are_converted(place, reader):
    path = place.tampered("checkpoint_best.pt", lambda state: old_settings(state, place))
    words = READERS[reader].format(stream=place.stream, path=path)
    assert "its settings are of an old fairseq" in place.refused(reader, *words.split())


@pytest.mark.parametrize("flag", ["--user-dir", "--help"])
def test_a_value_of_init_is_no_flag(place, flag):
    value = f"{flag}={place.own_code()}"
    path = place.tampered(
        "init.pt", lambda state: state["cfg"]["model"].update(activation_fn=value)
    )
    error = place.refused("fairseq-train", place.stream, "--task", "alma_lm", "--init", path)
    assert "could pass for a flag" in error


def test_values_reach_fairseq_in_one_word_with_their_flag():
    assert joined_words("--activation-fn", "--user-dir=x") == ["--activation-fn=--user-dir=x"]
    assert joined_words("--no-scale-embedding", True) == ["--no-scale-embedding"]
    assert joined_words("--moe-freq", None) == []


def test_the_sound_checkpoint_is_evaluated_and_its_user_dir_forgotten(place):
    code = str(place.own_code())
    path = place.tampered("mine.pt", lambda state: state["cfg"]["common"].update(user_dir=code))
    ended = place.run("evaluate", place.stream, "--path", path, "--cpu", "--out", "result.json")
    place.check(ended)
    assert ended.code == 0, ended
    assert memory_map(str(path))["cfg"]["common"]["user_dir"] is None


def test_counts_that_are_missing_are_one_line(place):
    path = place.tampered(
        "mine.pt", lambda state: state["extra_state"]["AlmaLMTask"].pop("train_tokens")
    )
    error = place.refused("evaluate", place.stream, "--path", path, "--cpu", "--out", "result.json")
    assert "train_tokens" in error


def test_literals_of_fairseqs_own_models_are_read():
    for layers in (
        "[(1268, 4)] * 13",
        "[(850, 6)] * 3 + [(850, 1)] * 1",
        "10000,20000",
        "False",
        "-1",
        "",
    ):
        saved_config.check_literal(layers)
    for layers in (
        "print()",
        "[x for x in y]",
        "a",
        "9**9",
        "[0] * [1]",
        "f'{1}'",
        "lambda: 0",
        "1 if 2 else 3",
    ):
        with pytest.raises(ValueError, match="no literal"):
            saved_config.check_literal(layers)


EVALUATED_OTHERWISE = {
    "data/audio/raw_audio_dataset.py: eval(feature_encoder_spec)": "feature_encoder_spec",
    "data/codedataset.py: eval(line.strip())": "",  # lines of data of speech, no setting
    "data/multilingual/multilingual_data_manager.py: eval_str_dict(uf, type=str)": "extra_data",
    "dataclass/utils.py: eval_str_list(x, float)": "",  # by ast.literal_eval
    "dataclass/utils.py: eval_str_list(x, int)": "",
    "dataclass/utils.py: eval_str_list(x, str)": "",
    "models/lightconv.py: utils.eval_str_list(x, int)": "decoder_kernel_size_list",
    "models/lightconv_lm.py: utils.eval_str_list(x, int)": "decoder_kernel_size_list",
    "modules/multihead_attention.py: "
    "utils.eval_str_dict(xformers_att_config)": "decoder_xformers_att_config",
    "utils.py: eval(x)": "",  # the three functions that the others call
}
"""Evaluations of what is no attribute, and the setting that they evaluate."""
BY_NAME = {
    "criterions/__init__.py": "files of the package",
    "data/audio/__init__.py": "files of the package",
    "data/encoders/__init__.py": "files of the package",
    "data/fasta_dataset.py": "proteins: no task of a checkpoint is set up",
    "data/plasma_utils.py": "a server of the cluster's, by --use-plasma-view of the command line",
    "distributed/utils.py": "scontrol, with variables of SLURM",
    "logging/meters.py": "classes of saved statistics: `_check_meters`",
    "model_parallel/criterions/__init__.py": "files of the package",
    "model_parallel/models/__init__.py": "files of the package",
    "models/__init__.py": "files of a --user-dir, of the command line",
    "models/ema/__init__.py": "files of the package",
    "models/huggingface/__init__.py": "files of the package",
    "modules/quantization/scalar/ops.py": "a method that the code names",
    "optim/__init__.py": "files of the package",
    "optim/fused_adam.py": "a fixed name",
    "optim/lr_scheduler/__init__.py": "files of the package",
    "scoring/__init__.py": "files of the package",
    "tasks/__init__.py": "files of a --user-dir, of the command line",
    "utils.py": "import_user_module: --user-dir of the command line",
}
"""Files of fairseq that import or look up by a name or start a program,
and what the name comes from."""


def test_all_texts_that_fairseq_evaluates_are_known():
    names, otherwise = sources.evaluated_settings()
    assert names - saved_config.EVALUATED == set()
    assert otherwise == EVALUATED_OTHERWISE.keys()
    assert set(filter(None, EVALUATED_OTHERWISE.values())) - saved_config.EVALUATED == set()


def test_all_imports_by_name_in_fairseq_are_known():
    assert {call.partition(":")[0] for call in sources.by_name()} == BY_NAME.keys()
    assert len(sources.by_name()) == 23
