#!/bin/sh
# The stream of the paper's language models (section 5, Datasets; appendix B.2): Books, Wikipedia and Common
# Crawl, 4 mega-batches and an evaluation mega-batch of 440M words each, .5M words of Common Crawl for validation,
# 50,000 BPE tokens. 2.2 billion words are about 13 GB of text.
#
# Open: which documents. The paper takes "a portion" of the corpus of RoBERTa (Liu et al., 2019), without saying
# which portion, in which shares, or how documents are told apart.
#   books    BookCorpus is no longer distributed. Public-domain books of Project Gutenberg come closest.
#   wiki     an English dump of dumps.wikimedia.org through WikiExtractor: `wiki/*/wiki_*`
#   web      CC-News of RoBERTa, or WET files of any crawl of data.commoncrawl.org: `cc/**/*.wet.gz`
# The result has the same documents in the same order for any number of workers.
#
# Time and disk, from the rates of one core (LOG.md): 9.6 s of CPU for 100 MB, so 13 GB take 24 minutes on one
# core; a copy of the text while it runs (13 GB), and about 6 GB that remain (2 bytes a token).
#   sh experiments/streams/paper.sh BOOKS WIKI WEB [STREAM]
set -e
alma data "books=$1" "wiki=$2" "web=$3" --out "${4:-stream}" \
	--mega-batches 4 --words 440M --eval-words 440M --valid-words 0.5M --valid-source web --vocab-size 50000
