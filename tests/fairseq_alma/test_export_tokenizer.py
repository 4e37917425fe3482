"""The tokenizer of an exported model is that of the model whose folder made the stream."""

from types import SimpleNamespace

import pytest

transformers = pytest.importorskip("transformers")


def test_the_tokenizer_of_a_sentencepiece_like_model_comes_back(tmp_path):
    """A stream with the tokenizer of Llama 2 or Gemma exports one with the same ids and text."""
    from data_prep.__main__ import main
    from data_prep.documents import normalise
    from fairseq_alma.hugging_face import tokenizer_of
    from tests.data_prep.conftest import make_documents, run
    from tests.data_prep.tokenizer_folders import folders, random_texts

    (tmp_path / "text.txt").write_text("\n\n".join(make_documents(1, 60)))
    models = folders(tmp_path / "models")
    sizes = "--mega-batches 1 --words 600 --eval-words 100 --valid-words 100 --workers 1".split()
    for kind in ("llama2", "gemma"):
        stream = tmp_path / kind
        run(main, tmp_path / "text.txt", *sizes, "--tokenizer", models[kind], "--out", stream)
        config = SimpleNamespace(eos_token_id=2, vocab_size=640, pad_token_id=None)
        tokenizer_of(stream, config).save_pretrained(tmp_path / "exported")
        exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
        before = transformers.AutoTokenizer.from_pretrained(models[kind])
        assert exported.eos_token_id == before.eos_token_id == 2
        for text in map(normalise, random_texts(50)):
            settings = {"add_special_tokens": False, "split_special_tokens": True}
            ids = exported(text, **settings).input_ids
            assert ids == before(text, **settings).input_ids
            assert exported.decode(ids) == text
