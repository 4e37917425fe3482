"""Raw text to deduplicated, i.i.d. mega-batches of token ids in fairseq's memory-mapped format.

`pipeline` runs the stages that `stages` lists. Their intermediate files lie in a work directory
(`work`); of several files of a task the last one marks it as finished:

    dates       dates-NNNNN.json     the periods of a shard, in a dated stream
    scan        entries-NNNNN.bin    an ENTRY for each document of a shard, to drop near duplicates
                skipped-NNNNN.json   the bad input that was skipped
                scan-NNNNN.bin       a RECORD for each document of a shard, in sorted runs
    bands       bands-NNNNN.bin      BANDs of MinHashes, in sorted runs
    near        near-NNNNN.bin       NEARs, near duplicates in a range of bands
    keys        keys-NNNNN.bin       a RECORD for each document of a stream that grows
    sort        similar-NNNNN.bin    NEARs of a range of keys
                range-NNNNN.bin      RECORDs of a range of keys, in hash order
                again-NNNNN.bin      those of them that are placed when earlier splits are cut
                valid-NNNNN.bin      those of the validation source, by second hash
                sums-NNNNN.npz       documents, words and bytes of a range
    cut         cut.npz              the Cut: where the splits end in the hash order
    plan        dropped-NNNNN.bin    documents of a range that are left out
                parts-NNNNN.npz      what a range gives to each bucket
                plan.npz             the CorpusPlan: what every bucket holds
    hashes      past-NNNNN.bin       ENTRYs that the stream keeps
    copies      copies-NNNNN.jsonl   documents dropped as duplicates, and those that they repeat
    shuffle     spill-NNNNN.bin      texts of a shard, in runs sorted by bucket
                spill-NNNNN.index    an INDEX for each text
                spill-NNNNN.npy      (runs, buckets + 1, 2) where each bucket begins
    tokenizer   tokenizer.model      unless a tokenizer is given
    encode      bucket-NNNNN.bin     token ids of a bucket
                bucket-NNNNN.jsonl   its documents, if --write needs them
                bucket-NNNNN.npz     its sizes, counts, keys and sums
    finalise    stream/              .bin, .idx, .keys, ... of each part; then dict.txt
                PART.json            the Part

`install` then moves the finished files to the stream directory.
"""
