"""Raw text to deduplicated, i.i.d. mega-batches of token ids in fairseq's memory-mapped format.

`pipeline` runs the stages, each a module; finalise is in `encode`. Their intermediate files lie in a work
directory (`work`):

    scan        corpus            -> scan-NNNNN.bin           a record for each document of a shard
    keys        .keys of a stream -> keys-NNNNN.bin           the same for documents of a stream that grows
    bands       entries of scan   -> bands-NNNNN.bin          bands of MinHashes, with --near-duplicates drop
    near        bands             -> near-NNNNN.bin           near duplicates in a range of bands
    sort        scans             -> range-NNNNN.bin, ...     the records of a range of keys, in hash order
    cut         ranges            -> cut.npz                  where the splits end in the hash order
    plan        ranges, cut       -> dropped-NNNNN.bin, ...   buckets of the splits, and copies to leave out
    hashes      entries, cut      -> past-NNNNN.bin           MinHashes that the stream keeps
    shuffle     corpus, plan      -> spill-NNNNN.*            the documents of a shard, sorted by bucket
    tokenizer   spills            -> tokenizer.model          unless a tokenizer is given
    encode      spills, tokenizer -> bucket-NNNNN.{bin,npz}   token ids of a bucket
    finalise    encoded buckets   -> stream/                  .bin, .idx, .keys of each split, dict.txt

`install` then moves the finished files to the stream directory.
"""
