"""The engine of models that fairseq does not have: transformers' Trainer on a stage of a stream."""
