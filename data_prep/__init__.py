"""Raw text -> deduplicated, i.i.d. mega-batches -> SentencePiece ids in fairseq's mmap format."""
