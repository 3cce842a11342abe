"""A bundle in, tokens out."""
