"""Raw text to deduplicated, i.i.d. mega-batches of token ids in fairseq's memory-mapped format.

`pipeline` runs the stages, each a module; finalise is in `encode`. Their intermediate files lie in a work
directory (`work`); of several files of a task the last one marks it as finished:

    dates       dates-NNNNN.json         the periods of a shard, in a dated stream
    scan        scan-NNNNN.bin           a RECORD for each document of a shard, in runs; with near duplicates
                entries-NNNNN.bin        an ENTRY too; skipped-NNNNN.json is the bad input that was skipped
    keys        keys-NNNNN.bin           the same for documents of a stream that grows
    bands       bands-NNNNN.bin          BANDs of MinHashes, in runs
    near        near-NNNNN.bin           NEARs, near duplicates in a range of bands
    sort        range-NNNNN.bin          RECORDs of a range of keys, in hash order; `again`: those placed when
                                         earlier ones are cut; `similar`: its NEARs; `valid`: the validation
                                         source by second hash; `sums`: documents, words and bytes
    cut         cut.npz                  the Cut: where the splits end in the hash order
    plan        parts-NNNNN.npz          what the range gives to each bucket; `dropped`: what is left out
                plan.npz                 the CorpusPlan: what every bucket holds
    hashes      past-NNNNN.bin           ENTRYs that the stream keeps
    copies      copies-NNNNN.jsonl       which documents were dropped as duplicates, and of which
    shuffle     spill-NNNNN.bin, .index  texts of a shard by bucket, INDEXes; .npy: (runs, buckets + 1, 2)
    tokenizer   tokenizer.model          unless a tokenizer is given
    encode      bucket-NNNNN.bin, .npz   token ids of a bucket; sizes, counts, keys, sums
    finalise    stream/, SPLIT.json      .bin, .idx, .keys, dict.txt; the Part

`install` then moves the finished files to the stream directory.
"""
