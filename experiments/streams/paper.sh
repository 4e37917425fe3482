#!/bin/sh
# The stream of the paper's language models (section 5, Datasets; appendix B.2): Books, Wikipedia and Common
# Crawl, 4 mega-batches and an evaluation mega-batch of 440M words each, .5M words of Common Crawl for validation,
# GPT-2's byte-level BPE of 50,257 tokens ("following Radford et al."). 2.2 billion words are about 13 GB of text.
#
# Open: which documents. The paper takes "a portion" of the corpus of RoBERTa (Liu et al., 2019), without saying
# which portion, in which shares, or how documents are told apart.
#   books    BookCorpus is no longer distributed. Public-domain books of Project Gutenberg come closest.
#   wiki     an English dump of dumps.wikimedia.org through WikiExtractor: `wiki/*/wiki_*`
#   web      CC-News of RoBERTa, or WET files of any crawl of data.commoncrawl.org: `cc/**/*.wet.gz`
#   BPE      encoder.json and vocab.bpe, which fairseq's instructions for RoBERTa download from
#            https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/
# The result has the same documents in the same order for any number of workers.
#
# Time and disk, from the rates of one core (LOG.md): 17 to 19 s of CPU for 100 MB, 13 to 16 of them for this BPE, so
# 13 GB take about 40 minutes on one core; a copy of the text while it runs (13 GB), and about 6 GB that remain (2
# bytes a token).
#   sh experiments/streams/paper.sh BOOKS WIKI WEB ENCODER_JSON VOCAB_BPE [STREAM]
set -e
alma data "books=$1" "wiki=$2" "web=$3" --out "${6:-stream}" \
	--mega-batches 4 --words 440M --eval-words 440M --valid-words 0.5M --valid-source web \
	--bpe gpt2 --gpt2-encoder-json "$4" --gpt2-vocab-bpe "$5"
