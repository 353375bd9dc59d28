"""Conversations of a served policy, and what its users said of them: the files, and the rows to train on."""
