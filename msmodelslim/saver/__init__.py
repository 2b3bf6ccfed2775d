"""From a quantized module tree and its source checkpoint to the files that serving engines read, one format a file."""
