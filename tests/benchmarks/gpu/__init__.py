"""A quarter of an hour on one GPU: what Espalier does there, offline, compared with its peers (`__main__`)."""
