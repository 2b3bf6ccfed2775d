"""Model families: how a checkpoint becomes modules, one decoder layer at a time. One family a file."""
