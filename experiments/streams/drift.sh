#!/bin/sh
# Two streams that drift, from three texts: encyclopedia, books, web pages (UTF-8, a blank line between documents).
#   sh experiments/streams/drift.sh WIKI BOOKS WEB
# drift_domains: WIKI, BOOKS, WEB, a third of each. drift_slide: from WIKI to BOOKS in five steps. No text is in two
# mega-batches. 0.3M words a mega-batch, as size small of experiments/table2.yaml; two minutes of one core.
set -e
wiki=$1 books=$2 web=$3
parts=drift.corpus
mkdir -p "$parts"

# slice FILE FROM TO NAME: the lines of FILE whose last word is within the given words, in thousands
slice() {
	awk -v from="$2e3" -v to="$3e3" '{ words += NF } words > to + 0 { exit } words > from + 0' "$1" >"$parts/$4.txt"
}

slice "$wiki" 0 400 wiki
slice "$books" 0 400 books
slice "$web" 0 400 web
slice "$wiki" 400 550 wiki_mixed
slice "$books" 400 550 books_mixed
slice "$web" 400 550 web_mixed
settings="--words 0.3M --eval-words 20k --valid-words 10k --vocab-size 4000 --max-document-words 1k --seed 1"
python -m data_prep --ordered --out drift_domains $settings \
	"wiki=$parts/wiki.txt" "books=$parts/books.txt" "web=$parts/web.txt" \
	"mixed=$parts/wiki_mixed.txt" "mixed+=$parts/books_mixed.txt" "mixed+=$parts/web_mixed.txt"

for step in 0 1 2 3 4; do # shares of 4, 3, 2, 1 and 0 quarters of 400k words
	slice "$wiki" $((1000 + 400 * step)) $((1400 + 300 * step)) "wiki_$step"
	slice "$books" $((1000 + 400 * step)) $((1000 + 500 * step)) "books_$step"
done
python -m data_prep --ordered --out drift_slide $settings \
	"step0=$parts/wiki_0.txt" "step1=$parts/wiki_1.txt" "step1+=$parts/books_1.txt" "step2=$parts/wiki_2.txt" \
	"step2+=$parts/books_2.txt" "step3=$parts/wiki_3.txt" "step3+=$parts/books_3.txt" "step4=$parts/books_4.txt"
