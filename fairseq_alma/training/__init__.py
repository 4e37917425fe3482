"""Training a stage: optimizer, loss, precision, weight average, signals."""
