"""The data: schema, lossless store, conversions."""
