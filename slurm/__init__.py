"""The launcher: a chain of stages of one language-model learner, each restartable at any moment."""
