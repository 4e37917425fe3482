"""Turn Wikipedia's Parquet file into JSON lines: `python to_jsonl.py wiki.parquet > wiki.jsonl`.

A line is an article: {"text": title and paragraphs}. Articles below LEAST_WORDS words are left out.
"""

import json
import sys

import pyarrow.parquet

LEAST_WORDS = 50


def main() -> None:
    """Convert the file named on the command line."""
    with pyarrow.parquet.ParquetFile(sys.argv[1]) as file:
        for batch in file.iter_batches(columns=["title", "text"]):
            for article in batch.to_pylist():
                if len(article["text"].split()) >= LEAST_WORDS:
                    print(json.dumps({"text": f"{article['title']}\n{article['text']}"}))


if __name__ == "__main__":
    main()
