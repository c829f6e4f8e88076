"""Locality for the vision transformers of timm: a start as convolution, positional scores, heads as convolutions."""
