"""Quadratic positional scores for the vision transformers of timm."""
