"""Plugin of the package verifiers; runs in its interpreter, which needs nothing else of Espalier."""
