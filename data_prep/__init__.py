"""Raw text to deduplicated, i.i.d. mega-batches of token ids in fairseq's memory-mapped format.

`pipeline` runs the stages, each a module; finalise is in `encode`. Their intermediate files lie in a work
directory (`work`):

    scan        corpus            -> scan-NNNNN.bin           a record for each document of a shard
    plan        scans             -> bucket.npy, plan.npz     split and bucket of every document
    shuffle     corpus, plan      -> spill-NNNNN.*            the documents of a shard, sorted by bucket
    tokenizer   spills            -> tokenizer.model          unless a tokenizer is given
    encode      spills, tokenizer -> bucket-NNNNN.{bin,npz}   token ids of a bucket
    finalise    encoded buckets   -> stream/                  .bin, .idx, .keys of each split, dict.txt

`install` then moves the finished files to the stream directory.
"""
