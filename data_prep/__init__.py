"""Raw text to deduplicated, i.i.d. mega-batches of token ids in fairseq's memory-mapped format.

`pipeline` runs the stages, each a module; finalise is in `encode`. Their intermediate files lie in a work
directory (`work`); of several files of a task the last one marks it as finished:

    dates       corpus            -> dates-NNNNN.json         the periods of a shard, in a dated stream
    scan        corpus            -> entries-NNNNN.bin        an ENTRY for each document, with near duplicates
                                     skipped-NNNNN.json       the bad input that was skipped, if any
                                     scan-NNNNN.bin           a RECORD for each document of a shard, in runs
    keys        .keys of a stream -> keys-NNNNN.bin           the same for documents of a stream that grows
    bands       entries, .near    -> bands-NNNNN.bin          BANDs of MinHashes, in runs
    near        bands             -> near-NNNNN.bin           NEARs, near duplicates in a range of bands
    sort        scan, keys, near  -> range-NNNNN.bin          RECORDs of a range of keys, in hash order
                                     again-NNNNN.bin          those placed when earlier ones are cut
                                     similar-NNNNN.bin        its NEARs
                                     valid-NNNNN.bin          the validation source by second hash
                                     sums-NNNNN.npz           documents, words and bytes of the range
    cut         ranges            -> cut.npz                  the Cut: where the splits end in the hash order
    plan        ranges, cut       -> dropped-NNNNN.bin        shard * 2**32 + place of each document left out
                                     parts-NNNNN.npz          what the range gives to each bucket
                parts             -> plan.npz                 the CorpusPlan: what every bucket holds
    hashes      entries, cut      -> past-NNNNN.bin           ENTRYs that the stream keeps
    shuffle     corpus, plan      -> spill-NNNNN.bin, .index  texts of a shard by bucket; INDEXes
                                     spill-NNNNN.npy          (runs, buckets + 1, 2): document, byte
    tokenizer   spills            -> tokenizer.model          unless a tokenizer is given
    encode      spills, tokenizer -> bucket-NNNNN.bin, .npz   token ids of a bucket; sizes, counts, keys, sums
    finalise    encoded buckets   -> stream/, SPLIT.json      .bin, .idx, .keys, dict.txt; the Part

`install` then moves the finished files to the stream directory.
"""
