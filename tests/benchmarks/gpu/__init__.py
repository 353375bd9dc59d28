"""A GPU in ten minutes: what Espalier does on one GPU, offline, compared with its peers (`__main__`)."""
