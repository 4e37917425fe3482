"""How a stage trains: optimizer, loss, precision, averages, signals."""
